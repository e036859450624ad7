"""Trackio, a tracker that keeps runs on this machine. Needs the extra `offbeat-trainer[trackio]`."""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportUnknownLambdaType=false
# (trackio is optional: where it is not installed nothing of it has a type)

from __future__ import annotations

import logging
import uuid
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from offbeat_trainer.errors import TrainerError
from offbeat_trainer.metrics import reduce_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from offbeat_trainer.data.types import Group
    from offbeat_trainer.metrics import Metric

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class TrackioReporter:
    """A `Reporter` into a Trackio run of its own, whose name `folder` keeps in `trackio.name`; `trackio show` draws it.

    Trackio keeps all runs in one place (TRACKIO_DIR, or a folder of its own in the home). A run that goes on in its folder goes on
    there; steps that it repeats are there twice.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        project: str,
        name: str,
        config: Mapping[str, object] | None = None,
    ) -> None:
        """Start a run shown as `name` and a few letters, with its settings `config`, or go on with the one of this `folder`.

        Raises:
            TrainerError: trackio is not installed.
        """
        try:
            import trackio
        except ImportError as missing:
            raise TrainerError(
                "the Trackio reporter needs the package trackio; install `offbeat-trainer[trackio]` or leave the reporter out"
            ) from missing
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._markdown: Any = trackio.Markdown
        self._finish: Callable[[], None] = trackio.finish
        self._open = True
        self._run: Any = _quietly(
            lambda: trackio.init(
                project=project,
                name=_own_name(Path(folder) / "trackio.name", name),
                config=dict(config or {}),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        )

    def phase(self, name: str, detail: str = "") -> None:
        """Nothing: phases are for people."""

    def metrics(self, step: int, metrics: Sequence[Metric]) -> None:
        """Log every key."""
        self._run.log(reduce_metrics(metrics), step=step)

    def samples(self, step: int, title: str, groups: Sequence[Group], texts: Sequence[Sequence[str]]) -> None:
        """Log the completions as one text, prompt by prompt."""
        parts = [
            f"    {group.prompt.text}\n\n" + "\n\n".join(f"    → {text}" for text in group_texts)
            for group, group_texts in zip(groups, texts, strict=True)
        ]
        self._run.log({f"samples/{title}": self._markdown("\n\n---\n\n".join(parts))}, step=step)

    def summary(self, values: Mapping[str, object]) -> None:
        """Nothing: Trackio has none; the run's folder keeps it."""

    def close(self) -> None:
        """Finish the run; safe to call twice."""
        if self._open:
            self._open = False
            _quietly(self._finish)  # not the run's own: Trackio would say it again as Python exits


def _quietly(call: Callable[[], _Result]) -> _Result:
    """Return what `call` does; what it prints goes to the log."""
    said = StringIO()
    try:
        with redirect_stdout(said):
            return call()
    finally:
        log.info("%s", said.getvalue().strip())


def _own_name(kept: Path, name: str) -> str:
    if not kept.exists():
        kept.write_text(f"{name}-{uuid.uuid4().hex[:6]}", encoding="utf-8")
    return kept.read_text(encoding="utf-8")
