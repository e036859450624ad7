"""Which loop runs, and what it works with: the one place that knows all modes.

What an environment says becomes tokens, once: text as it is, or messages as the model's chat template writes them.
"""

# transformers is typed in part; tokenizers are called here.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, assert_never, cast

import torch

from offbeat_recipes.errors import TaskError
from offbeat_recipes.library.reward_model import ModelScorer
from offbeat_recipes.planning.algorithm import algorithm_of, offloads
from offbeat_recipes.planning.placement import default_threads, taken_cores
from offbeat_recipes.planning.replay import open_journal, recorded_schedule
from offbeat_recipes.tasks.base import make_scorer
from offbeat_rollout.toolkit.registry import adapter_environment
from offbeat_trainer.cluster.placement import ClusterSpec, RolloutSpec, TrainSpec
from offbeat_trainer.config import ClusterConfig
from offbeat_trainer.loops.online import run_fully_async, run_one_step_off, run_sync
from offbeat_trainer.loops.session import Session
from offbeat_trainer.rollouts.multi import EnvironmentSetup, MultiTurn
from offbeat_trainer.rollouts.own import NoScorer, RolloutSetup, find_rollout
from offbeat_trainer.rollouts.processes import EnvironmentProcesses
from offbeat_trainer.rollouts.scorer import FunctionScorer
from offbeat_trainer.rollouts.single import GroupGenerator, SingleTurn

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from offbeat_engine import EngineConfig
    from offbeat_recipes.run.context import RunContext
    from offbeat_recipes.run.folder import RunFolder
    from offbeat_recipes.settings.tree import RunConfig
    from offbeat_rollout import RolloutConfig
    from offbeat_trainer import Rollout, Scorer
    from offbeat_trainer.cluster.cluster import Cluster
    from offbeat_trainer.loops.outcome import Outcome
    from offbeat_trainer.loops.run_store import RunStore
    from offbeat_trainer.rollouts.environment import Message, Observation


_ANSWER = "an answer that no template knows"  # stands for the policy's turn, which is tokens already


def observation_encoder(
    tokenizer: PreTrainedTokenizerBase,
) -> Callable[[Observation, int | None], list[int]]:
    """Return what makes tokens of text, of messages, or of tokens, for `MultiTurn`: `(observation, last sampled token)`."""

    def encode(observation: Observation, last: int | None) -> list[int]:
        if isinstance(observation, str):
            return _ids(tokenizer, observation)
        if any(isinstance(one, Mapping) for one in observation):
            return after_turn(tokenizer, cast("Sequence[Message]", observation), last)
        return [int(one) for one in cast("Sequence[int]", observation)]

    return encode


def context_encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Observation], list[int]]:
    """Return what makes tokens of a history that an environment has edited: messages by the chat template, from their start."""

    def encode(context: Observation) -> list[int]:
        if isinstance(context, str):
            return _ids(tokenizer, context)
        if not any(isinstance(one, Mapping) for one in context):
            return [int(one) for one in cast("Sequence[int]", context)]
        if not tokenizer.chat_template:
            raise TaskError(
                "`Feedback.context` is messages, and the model's tokenizer has no chat template; say text"
            )
        messages = [*map(dict, cast("Sequence[Message]", context))]
        return _ids(
            tokenizer,
            str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)),
        )

    return encode


def after_turn(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], last: int | None
) -> list[int]:
    """Return the tokens with which the chat template goes on after an assistant's turn whose last sampled token is `last`.

    The template is asked about a made-up conversation: no token of the real one is ever written anew. Its end of the turn is
    left out where the policy sampled it, and added where the turn ended otherwise: at a stop text or another end token.

    Raises:
        TaskError: no turn came before (`last` is None), there is no template, or it does not leave an assistant's turn as it is.
    """
    if last is None:
        raise TaskError(
            "`reset` returned messages, and the prompt already opens the assistant's turn: put them into the prompt, or "
            "return text or token ids"
        )
    if not tokenizer.chat_template:
        raise TaskError(
            "the environment speaks in messages, and the model's tokenizer has no chat template; say text"
        )
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    whole = str(
        tokenizer.apply_chat_template(
            [*talk, *map(dict, messages)], tokenize=False, add_generation_prompt=True
        )
    )
    _, answer, rest = whole.partition(_ANSWER)
    if not answer:
        raise TaskError(
            "the model's chat template does not write an assistant's turn as it is; let the environment say text"
        )
    ids = _ids(tokenizer, rest)
    return ids[1:] if ids[:1] == [last] else ids


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(cast("list[int]", tokenizer(text, add_special_tokens=False)["input_ids"])) if text else []


def cluster_spec(config: RunConfig, folder: RunFolder, base_model: str) -> ClusterSpec:
    """Return what the processes of a run are told; replicas start from `base_model`."""
    cluster: dict[str, Any] = {
        **asdict(config.cluster),
        "start_timeout_s": config.start_timeout_s,
        "health_period_s": config.cluster.health_timeout_s / 12,
    }
    del cluster["device_memory_gib"]  # the plan's
    rollout = config.rollout_config(base_model, len(os.sched_getaffinity(0)))
    return ClusterSpec(
        cluster=ClusterConfig(**cluster),
        train=TrainSpec(
            engine_name=config.engine.name,
            device=config.device,
            num_ranks=config.engine.num_ranks,
            threads_per_rank=threads_per_rank(config),
            algorithm=algorithm_of(config),
            checkpoint_dir=str(folder.checkpoints.absolute()),
            taken_cores=taken_cores(config, 1),
            keep_checkpoints=config.trainer.keep_checkpoints,
            collective_timeout_s=config.trainer.step_timeout_s,
            # Fresh for each run; the processes get it over Ray, and nothing writes it down.
            sync=replace(config.sync_config(), secret=secrets.token_hex(32)),
        ),
        rollout=RolloutSpec(
            adapter_name=config.rollout.name,
            rollout=rollout,
            num_replicas=config.rollout.num_replicas,
            recompute_kv=config.asynchrony.recompute_kv,
            shares_cores=bool(config.cluster.ray_address)
            and config.colocated
            and not config.rollout.cpu_threads,
            environments=replica_environments(config, rollout),
        ),
        log_dir=str(folder.logs.absolute()),
        step_timeout_s=config.trainer.step_timeout_s,
        num_gpus=torch.cuda.device_count() if config.device == "cuda" else 0,
    )


def engine_on(config: RunConfig, model: Path) -> EngineConfig:
    """Return the settings of the training engine for the weights in folder `model`.

    On GPUs that replicas share, what the engine can keep in host memory between its updates goes there.
    """
    engine = config.engine_config("")
    if config.colocated and config.device == "cuda" and offloads(config):
        engine = replace(engine, offload_parameters=True, offload_optimizer=True)
    return replace(engine, model=replace(engine.model, path=str(model), random_init=False))


def threads_per_rank(config: RunConfig) -> int:
    """Return how many threads a training rank computes with: the cores, shared, unless the settings say.

    Where training and generation run side by side on a CPU, the replicas' cores are not among them. 0 on a cluster: whose cores
    they are is known when Ray has put the ranks somewhere.
    """
    if config.engine.threads_per_rank or config.cluster.ray_address:
        return config.engine.threads_per_rank
    return default_threads(config, len(os.sched_getaffinity(0)))


def replica_environments(config: RunConfig, rollout: RolloutConfig) -> tuple[dict[str, str], ...]:
    """Return the environment of each replica's process. On CPU every replica has cores of its own while they last.

    Which cores the machines of a cluster have is not known here: replicas there are bound to none.
    """
    cores = [] if config.cluster.ray_address else sorted(os.sched_getaffinity(0))
    width = rollout.cpu_threads * rollout.tensor_parallel_size if cores else 0
    return tuple(
        adapter_environment(
            config.rollout.name,
            rollout,
            [cores[(index * width + offset) % len(cores)] for offset in range(width)],
        )
        for index in range(config.rollout.num_replicas)
    )


def make_session(
    context: RunContext, cluster: Cluster, store: RunStore, rollout: Rollout, steps: int
) -> Session:
    """Return what the loop of this run works with, which begins at step `steps`. The caller closes rollout, journal and timeline."""
    config = context.config
    return Session(
        task=context.task,
        policy=cluster.train,
        rollout=rollout,
        steps=steps,
        publisher=cluster.publisher(),
        reporter=context.reporter,
        store=store,
        seed=config.seed,
        loop=config.trainer,
        algorithm=algorithm_of(config),
        sampling=config.sampling,
        stop=context.stop,
        asynchrony=config.asynchrony,
        journal=open_journal(context.folder.path),
        replay=recorded_schedule(config),
        timeline=cluster.timeline,
        watchdog=cluster.watchdog,
    )


def make_rollout(context: RunContext, cluster: Cluster) -> Rollout:
    """Return the way from prompts to scored groups, whose rewards and environments start at once. The caller closes it."""
    config, task, logs = context.config, context.task, context.folder.logs
    generator = GroupGenerator(cluster.rollout.generate_many, cluster.rollout.abort)
    if config.own_rollout:
        return find_rollout(config.own_rollout, config.environment.args)(
            RolloutSetup(
                generator=generator,
                scorer=_started_scorer(context),
                task=task,
                encode=observation_encoder(task.tokenizer),
                timeline=cluster.timeline,
                watchdog=cluster.watchdog,
                log=logs / "rollout.log",
            )
        )
    if config.turns is None:
        return SingleTurn(generator, _started_scorer(context), cluster.timeline)
    processes = EnvironmentProcesses(config.turns, logs / "environments.log")
    processes.start()
    return MultiTurn(
        generator,
        EnvironmentSetup(
            make=processes.make,
            decode=task.decode,
            encode=observation_encoder(task.tokenizer),
            encode_context=context_encoder(task.tokenizer),
            close=processes.close,
        ),
        config.turns,
        scorer=None if config.scored_apart else _started_scorer(context),
        timeline=cluster.timeline,
        watchdog=cluster.watchdog,
    )


def _started_scorer(context: RunContext) -> Scorer:
    """Return what scores completions; the processes that call reward functions start beside whatever else does."""
    if context.config.scored_apart:
        return NoScorer()
    if context.config.reward.model:
        return ModelScorer(context.config.reward)
    scorer = make_scorer(context.task, context.config.reward, context.folder.logs / "rewards.log")
    if isinstance(scorer, FunctionScorer):
        scorer.start()
    return scorer


def loop_of(config: RunConfig) -> Callable[[Session, Outcome, int], Coroutine[Any, Any, None]]:
    """Return the loop that the mode names; it trains from a step on."""
    match config.mode.name:
        case "sync":
            return run_sync
        case "one_step_off":
            return run_one_step_off
        case "fully_async":
            return run_fully_async
        case _:
            assert_never(config.mode.name)
