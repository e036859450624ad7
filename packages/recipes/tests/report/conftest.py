# pyright: basic
"""Run folders as runs write them, small and made by hand.

What real runs write is held to the same in test_real_runs.py.
"""

import gzip
import json

import pytest
import yaml

from offbeat_recipes.settings.reading import parse, to_dict

METRICS = {
    "reward/mean": lambda step: step / 10,
    "accuracy/train": lambda step: step / 10,
    "tokens/generated": lambda step: 100,
    "time/generate_s": lambda step: 1.5,
    "time/train_s": lambda step: 0.5,
    "train/grad_norm": lambda step: None if step == 2 else 1 + step,  # the second was not finite
    "mismatch/mean_abs_logprob_diff": lambda step: 1e-6,
    "staleness/max": lambda step: 0,
}
SUMMARY = {"wall_s": 12.0, "steps": 4, "reward_first": 0.1, "reward_last": 0.4, "interrupted": False}
EVENTS = [
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "trainer"}},
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "generation"}},
    {"pid": 1, "tid": 2, "ph": "b", "id": "0", "name": "group", "ts": 1000.0, "args": {"group": "0"}},
    {"pid": 1, "tid": 2, "ph": "b", "id": "1", "name": "group", "ts": 2000.0, "args": {"group": "1"}},
    {"pid": 1, "tid": 2, "ph": "e", "id": "0", "name": "group", "ts": 4000.0},
    {"pid": 1, "tid": 1, "ph": "X", "name": "generate", "ts": 1000.0, "dur": 5000.0, "args": {"detail": ""}},
    {"pid": 1, "tid": 1, "ph": "X", "name": "train", "ts": 6000.0, "dur": 2000.0, "args": {"detail": "d"}},
]


def _sample(step, completion, *, uid="a", reward=0.0, **others):
    row = {"step": step, "title": "sampled", "uid": uid, "prompt": f"prompt {uid}", "completion": completion}
    return {
        **row,
        "num_tokens": len(completion),
        "finish": "stop",
        "reward": reward,
        "correct": reward > 0,
        **others,
    }


@pytest.fixture
def sample():
    """Return what makes a line of samples.jsonl."""
    return _sample


@pytest.fixture
def make_run(tmp_path):
    """Return what writes a run folder: `make_run("a", {"seed": 1}, samples=[...])`."""

    def make(name="run", settings=None, *, samples=None, metrics=None, steps=4):
        folder = tmp_path / name
        (folder / "logs").mkdir(parents=True)
        config = json.loads(json.dumps(to_dict(parse(settings or {}))))
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        lines = [
            {"step": at, "time_s": 1.0, **{k: f(at) for k, f in {**METRICS, **(metrics or {})}.items()}}
            for at in range(1, steps + 1)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        rows = [_sample(4, "fine", reward=1.0), _sample(4, "wrong")] if samples is None else samples
        (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "summary.json").write_text(json.dumps(SUMMARY))
        (folder / "machine.json").write_text(json.dumps({"python": "3.11", "packages": {"torch": "2.13"}}))
        (folder / "trace.json").write_text(
            "[\n" + "".join(json.dumps(one) + ",\n" for one in EVENTS) + "{}]\n"
        )
        (folder / "logs" / "driver.log").write_text("x INFO version 1 went by `shm`: one machine\n")
        return folder

    return make


@pytest.fixture
def keep_trajectories(sample):
    """Return what writes the trajectories of a step: `keep_trajectories(folder, 4, ["text", ...])`."""

    def keep(folder, step, texts, **others):
        rows = [sample(step, text, uid=f"u{at}", title="trained", **others) for at, text in enumerate(texts)]
        (folder / "trajectories").mkdir(exist_ok=True)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "trajectories" / f"step_{step}.jsonl.gz").write_bytes(gzip.compress(text.encode()))

    return keep
