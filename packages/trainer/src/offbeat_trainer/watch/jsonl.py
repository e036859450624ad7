"""Reporters into files, and `Silent`, which says nothing.

`metrics.jsonl` and `samples.jsonl`: what a run measured and wrote, one JSON object a line.

`trajectories/step_<n>.jsonl.gz`: what a step trained, whole: texts, tokens, rewards, advantages, versions, log-probs.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from offbeat_trainer.data.metrics import DESCRIBED, reduce_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from offbeat_trainer.data.metrics import Metric
    from offbeat_trainer.data.types import Group, Trajectory


class Silent:
    """A `Reporter` that drops everything, so that no caller needs to ask whether there is one."""

    def phase(self, name: str, detail: str = "") -> None:
        """Drop it."""

    def metrics(self, step: int, metrics: Sequence[Metric]) -> None:
        """Drop them."""

    def samples(self, step: int, title: str, groups: Sequence[Group], texts: Sequence[Sequence[str]]) -> None:
        """Drop them."""

    def summary(self, values: Mapping[str, object]) -> None:
        """Drop it."""

    def close(self) -> None:
        """Do nothing."""


METRICS_FILE = "metrics.jsonl"
DESCRIBED_FILE = "metrics_described.json"
SAMPLES_FILE = "samples.jsonl"


class JsonlReporter(Silent):
    """A `Reporter` into a folder.

    `metrics.jsonl`: per call `{"step": ..., "time_s": <Unix time>, <keys sorted>}`; NaN and infinity become null,
    which JSON has. `metrics_described.json`: what those are that the code of the run describes; see `data.metrics.described`.
    `samples.jsonl`: one line per trajectory. Phases are for people, and whoever owns the run folder writes its summary.

    A line is written whole and handed to the system at once, so a killed process leaves at most one torn line, the
    last; opening the folder again drops it. A disk that is full costs the lines that it has no room for, and no others.
    """

    keeps_trying = True  # see `FanOut`

    def __init__(self, folder: str | Path) -> None:
        """Open both files of `folder` (made if missing) to append, without torn ends.

        Raises:
            OSError: the folder cannot be written.
        """
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._described: set[str] = set()
        self._metrics = _Lines(self._folder / METRICS_FILE)
        try:
            self._samples = _Lines(self._folder / SAMPLES_FILE)
        except OSError:
            self._metrics.close()
            raise

    def truncate_after(self, step: int) -> None:
        """Forget everything said about steps beyond `step`: a resumed run says it again. Atomic per file."""
        for lines in (self._metrics, self._samples):
            lines.keep(lambda line: int(line["step"]) <= step)

    def metrics(self, step: int, metrics: Sequence[Metric]) -> None:
        """Append one line; call it once per step."""
        values = {
            key: value if math.isfinite(value) else None for key, value in reduce_metrics(metrics).items()
        }
        self._metrics.append({"step": step, "time_s": round(time.time(), 3), **values})
        seen = self._described | (DESCRIBED.keys() & values.keys())
        if seen != self._described:
            with suppress(OSError):  # no room: the next step tries again, and no line is lost for it
                self._describe(seen)

    def samples(self, step: int, title: str, groups: Sequence[Group], texts: Sequence[Sequence[str]]) -> None:
        """Append one line per trajectory: step, title, prompt, what followed, its turns where it has several, and its score."""
        for group, group_texts in zip(groups, texts, strict=True):
            for index, (made, text) in enumerate(zip(group.trajectories, group_texts, strict=True)):
                line = _line(step, title, group, made, text)
                if not made.is_plain:
                    line["turns"] = [
                        {
                            "observed": len(turn.observed),
                            "sampled": turn.completion.num_tokens,
                            "reward": turn.reward,
                        }
                        for turn in made.turns
                    ]
                if group.scores:
                    line["reward"] = group.scores[index].reward
                    line["correct"] = group.scores[index].correct
                self._samples.append(line)

    def _describe(self, seen: set[str]) -> None:
        table = {key: asdict(DESCRIBED[key]) for key in sorted(seen)}
        beside = self._folder / f"{DESCRIBED_FILE}.tmp"
        beside.write_text(json.dumps(table, ensure_ascii=False, indent=1), encoding="utf-8")
        beside.replace(self._folder / DESCRIBED_FILE)
        self._described = seen

    def close(self) -> None:
        """Close both files; safe to call twice."""
        self._metrics.close()
        self._samples.close()


def _line(step: int, title: str, group: Group, made: Trajectory, text: str) -> dict[str, Any]:
    """Return what a line says of a trajectory of `group` in either file, before its turns and its score."""
    return {
        "step": step,
        "title": title,
        "uid": group.prompt.uid,
        "prompt": group.prompt.text,
        "completion": text,
        "num_tokens": made.num_tokens,
        "finish": made.finish,
    }


class _Lines:
    """A file of JSON lines, open at its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        _drop_torn_end(path)
        self._file = path.open("ab", buffering=0)

    def append(self, line: Mapping[str, object]) -> None:
        """Write `line`, whole or not at all; `OSError` where there is no room for it."""
        # A lone surrogate, which UTF-8 cannot hold, becomes \\udc80: as it happens, its escape in JSON.
        text = json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n"
        rest = memoryview(text.encode("utf-8", "backslashreplace"))
        end = os.fstat(self._file.fileno()).st_size
        try:
            while rest:  # on a disk that fills up, a write may take a part
                rest = rest[os.write(self._file.fileno(), rest) :]
        except OSError as error:
            os.ftruncate(self._file.fileno(), end)
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def keep(self, wanted: Callable[[dict[str, int]], bool]) -> None:
        # Bytes: text would also be split at the line separators of Unicode, which JSON leaves in strings as they are.
        kept = [line for line in self._path.read_bytes().split(b"\n") if line and wanted(json.loads(line))]
        beside = self._path.with_suffix(".tmp")
        beside.write_bytes(b"".join(line + b"\n" for line in kept))
        beside.replace(self._path)
        self._file.close()
        self._file = self._path.open("ab", buffering=0)

    def close(self) -> None:
        self._file.close()


def _drop_torn_end(path: Path) -> None:
    """Cut `path` after its last line end."""
    if not path.exists():
        return
    whole = path.read_bytes()
    end = whole.rfind(b"\n") + 1
    if end < len(whole):
        os.truncate(path, end)


FOLDER = "trajectories"
POLICY, ENVIRONMENT, CONTEXT = "policy", "environment", "context"
_NAME = re.compile(r"step_(\d+)\.jsonl\.gz")


@runtime_checkable
class KeepsTrajectories(Protocol):
    """A reporter that takes what a step trained."""

    def trajectories(
        self,
        step: int,
        groups: Sequence[Group],
        decode: Callable[[list[int]], str],
        advantages: Sequence[Tensor] | None = None,
    ) -> None:
        """Keep some of the `groups` that `step` trained; `decode` makes text of tokens.

        `advantages` are those of each trajectory's tokens [T], in the order of `groups`; None: not known.
        """
        ...


class TrajectoryReporter(Silent):
    """A `Reporter` that writes a file a step, a line a trajectory: prompt, completion, score, turns.

    A turn has `role` ("policy", "environment", "context" where its history was edited), `text` and `token_ids`; the policy's has `reward`, `logprobs`
    as the sampler saw them, `versions`, the weights that made it: (version, number of tokens), and where they are known the
    `advantages` it was trained by. The first of a step, up to `MAX_PIECES` tokens, have `pieces`, see `pieces_of`.
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

    def trajectories(
        self,
        step: int,
        groups: Sequence[Group],
        decode: Callable[[list[int]], str],
        advantages: Sequence[Tensor] | None = None,
    ) -> None:
        """Write those of `step`, whose file is there soon after.

        Raises:
            OSError: those of a step before could not be written.
        """
        given = repeat(None) if advantages is None else iter(advantages)
        rows = [row for group in groups[: self._groups_per_step] for row in _rows(step, group, decode, given)]
        _add_pieces(rows, decode)
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

    def _write(self, step: int, rows: list[dict[str, Any]]) -> None:
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


def _rows(
    step: int, group: Group, decode: Callable[[list[int]], str], advantages: Iterator[Tensor | None]
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for index, one in enumerate(group.trajectories):
        row = _line(step, "trained", group, one, decode(one.token_ids.tolist()))
        row["turns"] = _turns(one, decode, next(advantages))
        if group.scores:
            score = group.scores[index]
            row |= {"reward": score.reward, "correct": score.correct, "parts": dict(score.parts)}
        rows.append(row)
    return rows


def _turns(
    one: Trajectory, decode: Callable[[list[int]], str], advantages_T: Tensor | None
) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    begin = 0
    for turn in one.turns:
        observed, made = turn.observed.tolist(), turn.completion
        if turn.context is not None:
            context = turn.context.tolist()
            turns.append({"role": CONTEXT, "text": decode(context), "token_ids": context})
        if observed:
            turns.append({"role": ENVIRONMENT, "text": decode(observed), "token_ids": observed})
        tokens = made.token_ids.tolist()
        begin += len(observed)
        entry: dict[str, Any] = {"role": POLICY, "text": decode(tokens), "token_ids": tokens}
        entry["logprobs"] = [round(value, 5) for value in made.logprobs.tolist()]
        entry["versions"] = [(version, end - start) for version, start, end in made.spans]
        if advantages_T is not None:
            own = cast("list[float]", advantages_T[begin : begin + len(tokens)].tolist())
            entry["advantages"] = [round(value, 5) for value in own]
        turns.append(entry | {"reward": turn.reward})
        begin += len(tokens)
    return turns


MAX_PIECES = 20_000
"""Of so many tokens a step the pieces are kept: to decode each takes some 20 microseconds, while the run waits."""


def _add_pieces(rows: Sequence[dict[str, Any]], decode: Callable[[list[int]], str]) -> None:
    @cache
    def text_of(token_ids: tuple[int, ...]) -> str:
        return decode(list(token_ids))

    left = MAX_PIECES
    for row in rows:
        spoken = [turn for turn in row["turns"] if turn["role"] == POLICY]
        left -= sum(len(turn["token_ids"]) for turn in spoken)
        if left < 0:
            return
        for turn in spoken:
            pieces = pieces_of(turn["token_ids"], text_of)
            # Else the tokenizer makes another text of a part than of the whole.
            if "".join(pieces) == turn["text"]:
                turn["pieces"] = pieces


def pieces_of(token_ids: Sequence[int], text_of: Callable[[tuple[int, ...]], str]) -> list[str]:
    """Return the text that each token adds to those before it.

    A token that ends within a character adds "", and the one that completes it has the character.
    """
    pieces: list[str] = []
    begin = read = 0  # a token is decoded behind the one before, which says whether it begins with a space
    for end in range(1, len(token_ids) + 1):
        before, text = text_of(tuple(token_ids[begin:read])), text_of(tuple(token_ids[begin:end]))
        if text.endswith("\ufffd") and end - read < _MAX_CHARACTER_BYTES and end < len(token_ids):
            pieces.append("")
            continue
        pieces.append(text[len(before) :])
        begin, read = read, end
    return pieces


_MAX_CHARACTER_BYTES = 4
