"""`metrics.jsonl` and `samples.jsonl`: what a run measured and wrote, one JSON object a line."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat_trainer.metrics import reduce_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from offbeat_trainer.data.types import Group
    from offbeat_trainer.metrics import Metric

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"


class JsonlReporter:
    """A `Reporter` into a folder.

    `metrics.jsonl`: per call `{"step": ..., "time_s": <Unix time>, <keys sorted>}`; NaN and infinity become null,
    which JSON has. `samples.jsonl`: one line per trajectory.

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

    def phase(self, name: str, detail: str = "") -> None:
        """Nothing: phases are for people."""

    def metrics(self, step: int, metrics: Sequence[Metric]) -> None:
        """Append one line; call it once per step."""
        values = {
            key: value if math.isfinite(value) else None for key, value in reduce_metrics(metrics).items()
        }
        self._metrics.append({"step": step, "time_s": round(time.time(), 3), **values})

    def samples(self, step: int, title: str, groups: Sequence[Group], texts: Sequence[Sequence[str]]) -> None:
        """Append one line per trajectory: step, title, prompt, what followed, its turns where it has several, and its score."""
        for group, group_texts in zip(groups, texts, strict=True):
            for index, (made, text) in enumerate(zip(group.trajectories, group_texts, strict=True)):
                line: dict[str, object] = {
                    "step": step,
                    "title": title,
                    "uid": group.prompt.uid,
                    "prompt": group.prompt.text,
                    "completion": text,
                    "num_tokens": made.num_tokens,
                    "finish": made.finish,
                }
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

    def summary(self, values: Mapping[str, object]) -> None:
        """Nothing: whoever owns the run folder writes its summary."""

    def close(self) -> None:
        """Close both files; safe to call twice."""
        self._metrics.close()
        self._samples.close()


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
