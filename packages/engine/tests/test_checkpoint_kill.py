"""SIGKILL at random moments of saving: what is found afterwards is whole, and the newest of it loads.

One process with the libraries loaded forks a child for each kill; the child saves one checkpoint after the other, each
with all weights and moments equal to its step, so that a mixture of two checkpoints shows.
"""

import os
import random
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from offbeat_engine import (
    CheckpointError,
    Fsdp2Config,
    ModelConfig,
    SftLoss,
    World,
    engine_class,
)
from offbeat_engine.testing import make_tiny_model, random_batch
from offbeat_engine.toolkit.state.checkpoint_folders import META, step_path, whole_steps

pytestmark = pytest.mark.spawns

KEEP = 2

CHILD = """
import os, sys
import torch
from offbeat_engine import Fsdp2Config, ModelConfig, SftLoss, World, engine_class
from offbeat_engine.testing import random_batch

def say(line):
    os.write(1, f"{line}\\n".encode())  # all at once: a kill between two writes would glue two lines together

torch.set_num_threads(1)
model, folder = sys.argv[1:]
engine = engine_class("fsdp2")(Fsdp2Config(model=ModelConfig(path=model)), World())
engine.init_model()
engine.set_loss_fn(SftLoss())
for line in sys.stdin:
    child = os.fork()
    if child:
        say(f"child {child}")
        os.waitpid(child, 0)
        say("gone")
        continue
    with engine.train_mode():
        engine.forward_backward_step(random_batch(2))
        engine.optimizer_step()
    updater = engine._ready().updater
    step = int(line)
    while True:
        step += 1
        say(f"saving {step}")
        for state in updater.moments().values():
            for value in state.values():
                value.fill_(float(step))
        with torch.no_grad():
            for weight in updater.params.values():
                weight.fill_(float(step))
        # Every other one goes on in the background, while the next fills the weights anew.
        engine.save_checkpoint(folder, global_step=step, max_ckpt_to_keep=%d, block=step %% 2 == 0)
"""


@pytest.fixture
def saver(tmp_path):
    model = make_tiny_model(tmp_path / "model", hidden=64, vocab_size=512)
    script = tmp_path / "saver.py"
    script.write_text(textwrap.dedent(CHILD % KEEP))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        [sys.executable, str(script), model, str(tmp_path / "checkpoints")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    yield process, model, tmp_path / "checkpoints"
    process.stdin.close()
    assert process.wait(600) == 0
    process.stdout.close()


def test_kills_leave_whole_checkpoints_or_none(saver, deep):
    wanted = 50 if deep else 8
    process, model, folder = saver
    rng = random.Random(0)
    torch.set_num_threads(1)
    engine = engine_class("fsdp2")(Fsdp2Config(model=ModelConfig(path=model)), World())
    engine.init_model()
    newest, inside, save_s = 0, 0, 0.0
    for kill in range(5 * wanted):
        ask(process, str(newest))
        child, saves, started = 0, 0, 0.0
        # The first child also tells how long a save takes here: of step 4, which is waited for.
        first = 5 if kill == 0 else rng.randint(1, 3)
        while not child or saves < first:
            word, number = process.stdout.readline().split()
            if word == "child":
                child = int(number)
            else:
                saves += 1
                started, save_s = time.perf_counter(), time.perf_counter() - started if saves > 1 else save_s
        time.sleep(rng.uniform(0, save_s))
        os.kill(child, signal.SIGKILL)
        while (line := process.stdout.readline()).strip() != "gone":
            assert line, "the saver has ended"
        inside += any(path.name.endswith(".partial") for path in folder.glob(".*"))
        newest = check(engine, folder, newest)
        if inside == wanted:
            break
    assert newest >= wanted // 5, "the children hardly saved anything: the kills proved nothing"
    assert inside == wanted, "hardly a kill fell into a save: the kills proved nothing"
    assert len(whole_steps(folder)) <= KEEP + 1  # killed before pruning


def ask(process, line):
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def check(engine, folder, before):
    """Load the newest checkpoint, compare every number with its step, and return that."""
    found = whole_steps(folder)
    if not found:
        assert before == 0, f"checkpoint {before} was there and is gone"
        return 0
    step = engine.load_checkpoint(str(folder))
    assert found[-1] == step
    assert (step_path(folder, step) / META).is_file()
    assert step >= before
    for name, weight in engine.named_weights():
        assert bool((weight == step).all()), f"{name} of step {step} holds {weight.unique().tolist()[:4]}"
    for name, state in engine._ready().updater.moments().items():
        for key, value in state.items():
            assert bool((value == step).all()), f"{key} of {name} of step {step}"
    return step


def test_a_checkpoint_with_half_a_file_does_not_load(tmp_path):
    """What the kills must never leave: the check above would notice, and it is no bare error of torch's."""
    model, folder = make_tiny_model(tmp_path / "model"), tmp_path / "checkpoints"
    engine = engine_class("fsdp2")(Fsdp2Config(model=ModelConfig(path=model)), World())
    engine.init_model()
    engine.set_loss_fn(SftLoss())
    with engine.train_mode():
        engine.forward_backward_step(random_batch(2))
        engine.optimizer_step()
    engine.save_checkpoint(str(folder), global_step=1)
    doomed = max(
        (path for path in (folder / "step_1").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size
    )
    doomed.write_bytes(doomed.read_bytes()[: doomed.stat().st_size // 2])
    with pytest.raises(CheckpointError):
        engine.load_checkpoint(str(folder))
