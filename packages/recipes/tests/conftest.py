# pyright: basic
"""What the processes of these tests agree on."""

import json
import os
import subprocess
import sys

import pytest

# Ends with its standard input, and so with the tests, however those end.
RAY = """
import sys
from offbeat_recipes.cli._environment import prepare_environment
prepare_environment()  # Ray's workers have it from the Ray that starts them
import ray
from offbeat_trainer.cluster.fork_server import fork_server
from offbeat_trainer.cluster.ray_runtime import start_ray, stop_ray
from offbeat_trainer.config import ClusterConfig
with fork_server(["offbeat_engine.fsdp2.engine", "offbeat_rollout.hf.engine", "offbeat_trainer.algorithms.learner"]):
    start_ray(ClusterConfig(object_store_mib=256), num_gpus=0)
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
    stop_ray()
"""
STOP_TIMEOUT_S = 300.0
READ = """
import json, sys
from inspect_ai.log import read_eval_log

def found(path):
    log = read_eval_log(path)
    samples = [
        {
            "id": one.id, "epoch": one.epoch, "messages": [[message.role, message.text] for message in one.messages],
            "output": one.output.completion, "stop": one.output.stop_reason,
            "scores": {name: score.value for name, score in one.scores.items()}, "versions": one.metadata["versions"],
        }
        for one in log.samples
    ]
    return {"status": log.status, "metadata": log.eval.metadata, "samples": samples, "mean": log.results.scores[0].metrics["mean"].value}

print(json.dumps([found(path) for path in sys.argv[1:]]))
"""


@pytest.fixture(scope="module")
def shared_ray():
    """One Ray for the runs here, as on a cluster, where they come and go; return the setting that names it.

    Runs that start their own: one that is ended by Ctrl-C, and one that is started as a person starts it.
    """
    head = subprocess.Popen(
        [sys.executable, "-c", RAY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert head.stdout is not None
    address = head.stdout.readline().strip()
    assert address, "Ray did not start; it says why above"
    yield f"cluster.ray_address={address}"
    head.communicate(timeout=STOP_TIMEOUT_S)


@pytest.fixture
def read_inspect(tmp_path):
    """Return what inspect-ai's own reader finds in log files, in a process of its own: it keeps what it likes in its home."""

    def read(files):
        done = subprocess.run(
            [sys.executable, "-c", READ, *map(str, files)],
            env={**os.environ, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return read
