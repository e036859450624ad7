"""Completions of a run as logs that `inspect view` of inspect-ai opens: one a step, in its format of JSON, version 2."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime
from itertools import groupby
from typing import TYPE_CHECKING, Any

from offbeat_recipes.errors import RunFolderError
from offbeat_recipes.report.collect import collect
from offbeat_recipes.settings.reading import flatten

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from offbeat_recipes.report.collect import Run

FOLDER = "inspect"
_ROLES = {"policy": "assistant", "environment": "user", "context": "user"}
_STOPS = {"stop": "stop", "length": "max_tokens"}


def write_inspect(path: Path) -> list[Path]:
    """Write a log for each step and title of the completions that the run in `path` kept; return the files.

    A sample is a completion: its id is the prompt's, its epoch counts the completions of that prompt. Turns are messages, the
    policy's those of the assistant. Scores are the reward, its parts, and whether it is right where that is known.

    Raises:
        RunFolderError: `path` is no run, or kept no completion.
    """
    run = collect(path)
    if not run.rows:
        raise RunFolderError(
            f"{path} has no completions; trainer.sample_every and report.trackers=[trajectories] say what a run keeps"
        )
    folder = path / FOLDER
    folder.mkdir(exist_ok=True)
    written: list[Path] = []
    in_order = sorted(run.rows, key=_log_of)
    for (step, title), rows in groupby(in_order, key=_log_of):
        file = folder / f"step_{step}_{title or 'completions'}.json"
        log = _log(run, step, title, list(rows), datetime.fromtimestamp(path.stat().st_mtime, UTC))
        file.write_text(json.dumps(log, ensure_ascii=False), encoding="utf-8", errors="backslashreplace")
        written.append(file)
    return written


def _log_of(row: dict[str, Any]) -> tuple[int, str]:
    return row["step"], row["title"]


def _log(run: Run, step: int, title: str, rows: Sequence[dict[str, Any]], at: datetime) -> dict[str, Any]:
    name, when = f"{run.name} step {step} {title}", at.isoformat(timespec="seconds")
    of_uid = Counter[str]()
    samples: list[dict[str, Any]] = []
    for row in rows:
        of_uid[row["uid"]] += 1
        samples.append(_sample(row, of_uid[row["uid"]], _model(run)))
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    mean = {"mean": {"name": "mean", "value": sum(rewards) / len(rewards)}} if rewards else {}
    return {
        "version": 2,
        "status": "success",
        "eval": {
            "created": when,
            "task": name,
            "dataset": {"name": str(flatten(run.config).get("task.name", "")), "samples": len(of_uid), "sample_ids": list(of_uid)},
            "model": _model(run),
            "config": {"epochs": max(of_uid.values())},
            "metadata": {"step": step, "title": title, "run": run.name},
        },
        "results": {
            "total_samples": len(rows),
            "completed_samples": len(rows),
            "scores": [{"name": "reward", "scorer": "reward", "metrics": mean}],
        },
        "stats": {"started_at": when, "completed_at": when},
        "samples": samples,
    }  # fmt: skip


def _model(run: Run) -> str:
    return f"offbeat/{flatten(run.config).get('model.path') or run.name}"


def _sample(row: dict[str, Any], epoch: int, model: str) -> dict[str, Any]:
    every: list[dict[str, Any]] = row["turns"] or []
    turns = [turn for turn in every if "text" in turn]
    if not any(turn["role"] == "policy" for turn in turns):
        turns = [{"role": "policy", "text": row["completion"]}]
    messages = [{"role": "user", "content": row["prompt"]}]
    messages += [{"role": _ROLES.get(turn["role"], "user"), "content": turn["text"]} for turn in turns]
    last = next(message for message in reversed(messages) if message["role"] == "assistant")
    parts: dict[str, float] = row["parts"] or {}
    scores: dict[str, Any] = {name: {"value": value} for name, value in parts.items()}
    if row["reward"] is not None:
        scores["reward"] = {"value": row["reward"]}
    if row["correct"] is not None:
        scores["correct"] = {"value": "C" if row["correct"] else "I"}
    return {
        "id": row["uid"],
        "epoch": epoch,
        "input": row["prompt"],
        "target": "",
        "messages": messages,
        "output": {
            "model": model,
            "choices": [{"message": last, "stop_reason": _STOPS.get(row["finish"], "unknown")}],
        },
        "scores": scores,
        "metadata": {
            "num_tokens": row["num_tokens"],
            "finish": row["finish"],
            "versions": [turn["versions"] for turn in turns if "versions" in turn],
        },
    }
