# pyright: basic
"""One way to start a cluster on this CPU, and to wait for what happens in it.

Ray reads some of its settings when it is imported: tests here import it only through these fixtures.
"""

import asyncio
import inspect
import os
import time
from contextlib import asynccontextmanager

import pytest

from offbeat_ckptsync import SyncConfig
from offbeat_engine import Fsdp2Config, ModelConfig, OptimizerConfig
from offbeat_engine.testing import make_tiny_model
from offbeat_rollout import GenerateRequest, RolloutConfig, SamplingParams
from offbeat_trainer import Grpo, GrpoConfig, StepShape
from offbeat_trainer.algorithms.roles import POLICY
from offbeat_trainer.cluster.fork_server import fork_server
from offbeat_trainer.config import ClusterConfig

ENVIRONMENT = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",
    "RAY_raylet_start_wait_time_s": "180",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_agent_register_timeout_ms": "300000",
    "OMP_NUM_THREADS": "1",
}
TIMEOUT_S = 600.0
POLL_S = 0.02


@pytest.fixture(scope="module", autouse=True)
def ray_environment():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def until():
    async def until(condition, what):
        """Wait until the function `condition`, a coroutine or not, says yes."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            answer = condition()
            if await answer if inspect.isawaitable(answer) else answer:
                return
            assert time.monotonic() < deadline, f"waited {TIMEOUT_S:g} s for {what}"
            await asyncio.sleep(POLL_S)

    return until


@pytest.fixture(scope="session")
def pid_of():
    async def pid_of(handle):
        return await asyncio.wait_for(handle.__ray_call__.remote(lambda _: os.getpid()), TIMEOUT_S)

    return pid_of


@pytest.fixture(scope="session")
def complete():
    async def complete(handle, requests):
        """Ask one replica, past the pool; return its completions in the order of `requests`."""
        made = {}
        async for some in handle.completions.options(num_returns="streaming").remote([requests]):
            made |= {completion.request_id: completion for _, completion in await some}
        return [made[request.request_id] for request in requests]

    return complete


@pytest.fixture(scope="session")
def requests():
    def requests(number, *, max_tokens=8):
        return [
            GenerateRequest(
                request_id=f"r{index}",
                prompt_ids=(1 + index % 30, 3),
                sampling=SamplingParams(max_tokens=max_tokens, seed=index),
            )
            for index in range(number)
        ]

    return requests


async def build(cluster, model):
    """Start both pools; the ranks train `model`."""
    policy = Fsdp2Config(model=ModelConfig(path=model), optimizer=OptimizerConfig(lr=1e-2))

    async def prepare():
        await cluster.train.build({POLICY: policy})
        return "built"

    assert await cluster.start(prepare) == "built"


def train_spec(folder, num_ranks, max_tokens, sync, own_cores):
    from offbeat_trainer.cluster.placement import TrainSpec

    return TrainSpec(
        engine_name="fsdp2",
        device="cpu",
        num_ranks=num_ranks,
        algorithm=Grpo(config=GrpoConfig(), step=StepShape(max_completion_tokens=max_tokens)),
        checkpoint_dir=str(folder),
        threads_per_rank=0 if own_cores else 1,
        keep_checkpoints=2,
        collective_timeout_s=TIMEOUT_S,
        sync=sync or SyncConfig(),
    )


@pytest.fixture(scope="session")
def forks():
    """Let the workers of each Ray here be forks; the server is there as long as the tests are."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        with fork_server(
            ["offbeat_engine.fsdp2.engine", "offbeat_rollout.hf.engine", "offbeat_trainer.algorithms.learner"]
        ):
            yield


@pytest.fixture(scope="session")
def started(forks):
    @asynccontextmanager
    async def started(
        folder,
        *,
        num_ranks=1,
        num_replicas=1,
        max_tokens=8,
        sync=None,
        own_cores=False,
        timeline=None,
        **cluster,
    ):
        """Start a policy of `num_ranks` and its replicas, all of one tiny model, and stop them in the end.

        With `own_cores` they compute with those of their machine, as Ray counts them; else with one thread each.
        """
        from offbeat_trainer.cluster.cluster import Cluster
        from offbeat_trainer.cluster.placement import ClusterSpec, RolloutSpec

        model = make_tiny_model(folder / "tiny")
        rollout = RolloutSpec(
            adapter_name="hf",
            rollout=RolloutConfig(model_path=model, max_model_len=1024),
            num_replicas=num_replicas,
            shares_cores=own_cores,
        )
        spec = ClusterSpec(
            cluster=ClusterConfig(object_store_mib=128, **cluster),
            train=train_spec(folder, num_ranks, max_tokens, sync, own_cores),
            rollout=rollout,
            log_dir=str(folder / "logs"),
            step_timeout_s=TIMEOUT_S,
        )
        cluster = Cluster(spec, timeline)
        try:
            await build(cluster, model)
            yield cluster
        finally:
            await cluster.stop()

    return started
