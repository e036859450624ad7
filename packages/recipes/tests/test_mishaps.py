"""A whole run in which much goes wrong: it ends well, and the closing panel says what happened."""

import json
import os
import re
import signal
import socketserver
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from offbeat_recipes.tasks.base import make_task
from offbeat_recipes.tasks.config import ArithmeticConfig

pytestmark = [pytest.mark.ray, pytest.mark.deep]

RUN_TIMEOUT_S = 1500.0
STEPS = 8
AWAY_S = 60.0
"""How long the judge is down and a replica is stopped; the slow save takes as long: twice the deadline of a rank that does not
move, as twenty minutes are by default."""
# Another package's adapter: each replica refuses the weights of version 2 once, so that the sync fails and costs nobody.
ADAPTER = """
import os
from pathlib import Path
from offbeat_rollout.errors import UpdateRefused
from offbeat_rollout.hf import HfEngine

class Mishaps(HfEngine):
    refused = False

    async def start(self):
        await super().start()
        Path(os.environ["MISHAPS"], f"replica_{os.getpid()}").touch()

    def refuse(self, version):
        if version == 2 and not self.refused:
            self.refused = True
            raise UpdateRefused("planted")

    async def load(self, tensors, version, **more):
        self.refuse(version)
        await super().load(tensors, version, **more)
        self.loaded(version)

    async def adopt(self, tensors, version, **more):
        self.refuse(version)
        served = await super().adopt(tensors, version, **more)
        if served:
            self.loaded(version)
        return served

    def loaded(self, version):
        if version > 1:
            Path(os.environ["MISHAPS"], f"loaded_{os.getpid()}").touch()
"""
# The rank waits in step 2 until the judge is down, stops a replica once both have taken what they had refused, and saves step 4
# slowly; before the last steps it waits until the replica was away for long enough. Stopped in the sync that the other refuses, it would take that one along: nobody could say what is served.
ALGORITHM = """
import os, signal, time
from pathlib import Path
from offbeat_trainer import Grpo
from offbeat_trainer.algorithms.learner import Learner

FOLDER = Path(os.environ.get("MISHAPS", "/nowhere"))
METRICS = FOLDER / "run" / "metrics.jsonl"
save = Learner.save

def move_until(done):
    with open("/dev/null", "wb", buffering=0) as disk:  # a rank that moves nothing would be taken for one that hangs
        while not done():
            disk.write(bytes(1 << 20))
            time.sleep(0.05)

def slowly(learner, step, *, block):
    ends = time.monotonic() + (AWAY_S if step == 4 else 0)
    move_until(lambda: time.monotonic() >= ends)
    save(learner, step, block=block)

Learner.save = slowly

class Mishaps(Grpo):
    def learn(self, roles, batch):
        rows = METRICS.read_text().count("\\n") if METRICS.exists() else 0  # none yet while it is tried before the run
        if rows == 1:
            (FOLDER / "trains").touch()
            while not (FOLDER / "down").exists():
                time.sleep(0.01)
        loaded = sorted(FOLDER.glob("loaded_*"))
        if rows >= 2 and len(loaded) == 2 and not (FOLDER / "stopped").exists():
            pid = loaded[0].name.removeprefix("loaded_")
            os.kill(int(pid), signal.SIGSTOP)
            (FOLDER / "stopped").write_text(pid)
        if rows == LAST:
            move_until((FOLDER / "awake").exists)
        return super().learn(roles, batch)
"""
REWARD = """
import socket

def score(completion, how):
    if how == "nothing":
        return None
    socket.create_connection(("127.0.0.1", {port}), timeout=600).close()
    return len(completion)
"""


class Judge(socketserver.ThreadingTCPServer):
    """Takes connections until it is closed; who comes then is refused."""

    allow_reuse_address = True

    def __init__(self, port=0):
        super().__init__(("127.0.0.1", port), socketserver.BaseRequestHandler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def close(self):
        self.shutdown()
        self.server_close()


class Running:
    """The run, and waiting for what it says in a file."""

    def __init__(self, words, folder, environment):
        self.out = folder / "out"
        with self.out.open("w") as out:
            self.process = subprocess.Popen(
                [Path(sys.executable).parent / "offbeat-train", *words],
                env=environment, stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.deadline = time.monotonic() + RUN_TIMEOUT_S

    def until(self, path, met):
        while not path.exists() or not met(path.read_text()):
            assert self.process.poll() is None, self.out.read_text()
            assert time.monotonic() < self.deadline, self.out.read_text()
            time.sleep(0.02)

    def stays(self, until_s):
        while time.monotonic() < until_s:
            assert self.process.poll() is None, self.out.read_text()
            time.sleep(0.1)


@pytest.fixture
def environment(tmp_path):
    """Return the environment in which a package is installed whose adapter is `mishaps`."""
    about = tmp_path / "site" / "mishaps-0.1.dist-info"
    about.mkdir(parents=True)
    (about.parent / "mishaps_adapter.py").write_text(ADAPTER)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mishaps\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("[offbeat.rollouts]\nmishaps = mishaps_adapter:Mishaps\n")
    paths = filter(None, (str(about.parent), os.environ.get("PYTHONPATH")))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "MISHAPS": str(tmp_path),
    }


def words_for(folder, port):
    rows = [{"prompt": f"{a}+2=", "how": "nothing" if a % 3 == 0 else "asks"} for a in range(10, 40)]
    data, fine = folder / "rows.jsonl", folder / "fine.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fine.write_text(json.dumps(rows[0] | {"how": "asks"}) + "\n")
    (folder / "judged.py").write_text(REWARD.replace("{port}", str(port)))
    (folder / "mishaps.py").write_text(f"AWAY_S, LAST = {AWAY_S}, {STEPS - 2}\n{ALGORITHM}")
    model = make_task(ArithmeticConfig(), "", 0).model_folder(folder / "base", 0)
    return [
        "task=file", f"task.train_path={data}", f"task.validation_path={fine}", f"model.path={model}",
        f"task.reward={folder}/judged.py:score", "reward.max_attempts=1", f"algorithm={folder}/mishaps.py:Mishaps",
        f"run_dir={folder}/run", "mode=fully_async", "rollout.name=mishaps", "rollout.num_replicas=2", "rollout.cpu_threads=1",
        "cluster.num_devices=3", "rollout.max_model_len=64", "task.max_prompt_tokens=16", "sampling.max_tokens=6",
        f"trainer.steps={STEPS}", "trainer.prompts_per_step=2", "trainer.group_size=2", "trainer.validate_every=0",
        "trainer.save_every=4", "trainer.step_timeout_s=30", "sync.transfer_timeout_s=60",
    ]  # fmt: skip


def test_a_run_in_which_everything_goes_wrong_ends_well_and_says_what_did(tmp_path, environment):
    judge = Judge()
    port = judge.server_address[1]
    run = Running(words_for(tmp_path, port), tmp_path, environment)
    try:
        log = tmp_path / "run" / "logs" / "driver.log"
        run.until(tmp_path / "trains", lambda _: True)
        judge.close()
        (tmp_path / "down").touch()
        down_s = time.monotonic()
        run.until(log, lambda text: "groups in a row could not be made" in text)
        run.stays(down_s + AWAY_S)
        judge = Judge(port)
        run.until(tmp_path / "stopped", bool)
        stopped_s = time.monotonic()
        run.until(log, lambda text: " is lost (" in text)
        run.until(log, lambda text: " serves again" in text)
        run.stays(stopped_s + AWAY_S)
        with suppress(ProcessLookupError):  # its successor serves: it may have been ended
            os.kill(int((tmp_path / "stopped").read_text()), signal.SIGCONT)
        (tmp_path / "awake").touch()
        assert run.process.wait(RUN_TIMEOUT_S) == 0, run.out.read_text()
    finally:
        judge.close()
        run.process.kill()
        run.process.wait()
    said = " ".join(run.out.read_text().replace("│", " ").split())
    assert "slow: the loop waits for the training ranks to write a checkpoint" in said
    panel = said[said.rindex(" done ") :]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert f"steps {STEPS} " in panel
    dropped = summary["dropped_groups"]
    assert dropped["reward_raised"] >= 1, "while the judge was down"
    assert dropped["reward_none_applies"] >= 1, "a third of the rewards"
    assert f"reward raised {dropped['reward_raised']:.0f}" in panel
    assert f"reward none applies {dropped['reward_none_applies']:.0f}" in panel
    assert summary["sync_failures"] >= 2, "one that both replicas refused, one in which one was silent"
    failures, fenced = (f"{summary[key]:.0f}" for key in ("sync_failures", "fenced_members"))
    assert f"in syncs {failures} failed and tried again, {fenced} without a replica" in panel
    lost = summary["lost_replicas"]
    assert not any("planted" in why for why in lost), "what was refused tore nothing"
    assert f"lost replicas {len(lost)}; the newest: " in panel
    assert "begin: took longer than" in panel
    assert summary["beside_s"]["save"] >= AWAY_S
    assert re.search(r"beside steps .*\bsave \d", panel)
