"""`trajectories/step_<n>.jsonl.gz`: what a step trained, whole: texts, tokens, rewards, versions, log-probs."""

from __future__ import annotations

import gzip
import json
import re
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from offbeat_trainer.watch.reporters.silent import Silent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat_trainer.data.types import Group, Trajectory

FOLDER = "trajectories"
POLICY, ENVIRONMENT = "policy", "environment"
_NAME = re.compile(r"step_(\d+)\.jsonl\.gz")


@runtime_checkable
class KeepsTrajectories(Protocol):
    """A reporter that takes what a step trained."""

    def trajectories(self, step: int, groups: Sequence[Group], decode: Callable[[list[int]], str]) -> None:
        """Keep some of the `groups` that `step` trained; `decode` makes text of tokens."""
        ...


class TrajectoryReporter(Silent):
    """A `Reporter` that writes a file a step, a line a trajectory: prompt, completion, score, turns.

    A turn has `role` ("policy", "environment"), `text` and `token_ids`; the policy's has `reward`, `logprobs`
    as the sampler saw them, and `versions`, the weights that made it: (version, number of tokens).
    Compressing and writing go on beside the run. When the folder has more than its budget, the files of the
    oldest steps go.
    """

    keeps_trying = True  # see `FanOut`

    def __init__(self, folder: str | Path, *, groups_per_step: int | None, max_bytes: int = 1 << 30) -> None:
        """Write below `folder` the first `groups_per_step` groups of each step (None: all)."""
        self._folder = Path(folder) / FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        self._groups_per_step = groups_per_step
        self._max_bytes = max_bytes
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="trajectories")
        self._writing: Future[None] | None = None

    def trajectories(self, step: int, groups: Sequence[Group], decode: Callable[[list[int]], str]) -> None:
        """Write those of `step`, whose file is there soon after.

        Raises:
            OSError: those of a step before could not be written.
        """
        rows = [row for group in groups[: self._groups_per_step] for row in _rows(step, group, decode)]
        self._finish()
        self._writing = self._writer.submit(self._write, step, rows)

    def truncate_after(self, step: int) -> None:
        """Remove what is there of later steps: a run that goes on says it again."""
        for number, path in self._files():
            if number > step:
                path.unlink()

    def close(self) -> None:
        """Wait for what is being written; safe to call twice."""
        self._writer.shutdown()
        self._finish()

    def _finish(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, step: int, rows: list[dict[str, object]]) -> None:
        path = self._folder / f"step_{step}.jsonl.gz"
        beside = path.with_name(f"{path.name}.writing")
        text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        try:
            beside.write_bytes(gzip.compress(text.encode("utf-8", "backslashreplace"), 3))
            beside.replace(path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise
        sizes = [(older, older.stat().st_size) for _, older in self._files()]
        excess = sum(size for _, size in sizes) - self._max_bytes
        for older, size in sizes:
            if excess > 0:
                older.unlink()
                excess -= size

    def _files(self) -> list[tuple[int, Path]]:
        """Return the files by step, the oldest first."""
        found = [(match, path) for path in self._folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        return sorted((int(match[1]), path) for match, path in found)


def _rows(step: int, group: Group, decode: Callable[[list[int]], str]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for index, one in enumerate(group.trajectories):
        row: dict[str, object] = {
            "step": step,
            "title": "trained",
            "uid": group.prompt.uid,
            "prompt": group.prompt.text,
            "completion": decode(one.token_ids.tolist()),
            "num_tokens": one.num_tokens,
            "finish": one.finish,
            "turns": _turns(one, decode),
        }
        if group.scores:
            score = group.scores[index]
            row |= {"reward": score.reward, "correct": score.correct, "parts": dict(score.parts)}
        rows.append(row)
    return rows


def _turns(one: Trajectory, decode: Callable[[list[int]], str]) -> list[dict[str, object]]:
    turns: list[dict[str, object]] = []
    for turn in one.turns:
        observed, made = turn.observed.tolist(), turn.completion
        if observed:
            turns.append({"role": ENVIRONMENT, "text": decode(observed), "token_ids": observed})
        tokens = made.token_ids.tolist()
        entry: dict[str, object] = {"role": POLICY, "text": decode(tokens), "token_ids": tokens}
        entry["logprobs"] = [round(value, 5) for value in made.logprobs.tolist()]
        entry["versions"] = [(version, end - start) for version, start, end in made.spans]
        turns.append(entry | {"reward": turn.reward})
    return turns
