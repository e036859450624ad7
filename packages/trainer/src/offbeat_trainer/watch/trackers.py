"""TensorBoard. Needs the extra `offbeat-trainer[tensorboard]`.

Trackio, a tracker that keeps runs on this machine. Needs the extra `offbeat-trainer[trackio]`.

Weights & Biases. Needs the extra `offbeat-trainer[wandb]`.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportMissingImports=false
# pyright: reportUntypedFunctionDecorator=false, reportAttributeAccessIssue=false, reportUnknownLambdaType=false
# (each is optional: where it is not installed nothing of it has a type; torch.utils.tensorboard is untyped)

from __future__ import annotations

import json
import logging
import uuid
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from offbeat_trainer.data.metrics import reduce_metrics
from offbeat_trainer.errors import TrainerError
from offbeat_trainer.watch.jsonl import Silent

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from offbeat_trainer.data.metrics import Metric
    from offbeat_trainer.data.types import Group


class TensorBoardReporter(Silent):
    """A `Reporter` into an event file: one scalar per key; settings, samples and summary as text."""

    def __init__(self, folder: str | Path, *, config: Mapping[str, object] | None = None) -> None:
        """Write to `folder`, the settings `config` of the run first.

        Raises:
            TrainerError: TensorBoard is not installed.
        """
        with _needs("tensorboard", "TensorBoard"):
            from torch.utils.tensorboard import SummaryWriter
        self._folder, self._writer_class = str(folder), SummaryWriter
        self._writer = SummaryWriter(self._folder)
        if config:
            self._writer.add_text("config", _block(config))

    def truncate_after(self, step: int) -> None:
        """Let readers hide what is there of later steps: a run that goes on from `step` says it again. The settings stay."""
        self._writer.close()
        self._writer = self._writer_class(self._folder, purge_step=max(step, 0) + 1)

    def metrics(self, step: int, metrics: Sequence[Metric]) -> None:
        """Write one scalar per key."""
        for key, value in reduce_metrics(metrics).items():
            self._writer.add_scalar(key, value, step)

    def samples(self, step: int, title: str, groups: Sequence[Group], texts: Sequence[Sequence[str]]) -> None:
        """Write the completions as one text, prompt by prompt."""
        self._writer.add_text(f"samples/{title}", _by_prompt(groups, texts), step)

    def summary(self, values: Mapping[str, object]) -> None:
        """Write the values as text."""
        self._writer.add_text("summary", _block(values))
        self._writer.flush()

    def close(self) -> None:
        """Flush and close; safe to call twice."""
        self._writer.close()


@contextmanager
def _needs(package: str, whose: str) -> Generator[None]:
    """Let the block import `package`, which is also the name of the extra that has it."""
    try:
        yield
    except ImportError as missing:
        raise TrainerError(
            f"the {whose} reporter needs the package {package}; install `offbeat-trainer[{package}]` or leave the reporter out"
        ) from missing


def _by_prompt(groups: Sequence[Group], texts: Sequence[Sequence[str]]) -> str:
    parts = [
        f"    {group.prompt.text}\n\n" + "\n\n".join(f"    → {text}" for text in group_texts)
        for group, group_texts in zip(groups, texts, strict=True)
    ]
    return "\n\n---\n\n".join(parts)


def _block(values: Mapping[str, object]) -> str:
    return f"```\n{json.dumps(dict(values), indent=2, default=str)}\n```"


log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class TrackioReporter(Silent):
    """A `Reporter` into a Trackio run of its own, whose name `folder` keeps in `trackio.name`; `trackio show` draws it.

    Trackio keeps all runs in one place (TRACKIO_DIR, or a folder of its own in the home). A run that goes on in its folder goes on
    there; steps that it repeats are there twice. It has no place for a summary, which the run's folder keeps.
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
        with _needs("trackio", "Trackio"):
            import trackio
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._markdown: Any = trackio.Markdown
        self._finish: Callable[[], None] = trackio.finish
        self._open = True
        self._run: Any = _quietly(
            lambda: trackio.init(
                project=project,
                name=_kept_in(Path(folder) / "trackio.name", f"{name}-{uuid.uuid4().hex[:6]}"),
                config=dict(config or {}),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        )

    def metrics(self, step: int, metrics: Sequence[Metric]) -> None:
        """Log every key."""
        self._run.log(reduce_metrics(metrics), step=step)

    def samples(self, step: int, title: str, groups: Sequence[Group], texts: Sequence[Sequence[str]]) -> None:
        """Log the completions as one text, prompt by prompt."""
        self._run.log({f"samples/{title}": self._markdown(_by_prompt(groups, texts))}, step=step)

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


def _kept_in(file: Path, fresh: str) -> str:
    """Return what `file` holds, which is `fresh` where there is no file yet."""
    if not file.exists():
        file.write_text(fresh, encoding="utf-8")
    return file.read_text(encoding="utf-8")


class WandbReporter(Silent):
    """A `Reporter` into a Weights & Biases run of its own, with the id that `folder` keeps in `wandb.id`.

    Offline it writes below `folder` only, to be sent later with `wandb sync`. A run that goes on in its folder goes on there; steps
    that it repeats are drawn again: they are an axis of their own, while W&B's own counter drops what does not rise.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        name: str,
        project: str | None = None,
        config: Mapping[str, object] | None = None,
        offline: bool = True,
    ) -> None:
        """Start a run shown as `name`, with its settings `config`, or go on with the one of this `folder`.

        Without a `project` W&B asks the variable WANDB_PROJECT, and takes "uncategorized" where there is none.

        Raises:
            TrainerError: wandb is not installed.
        """
        with _needs("wandb", "W&B"):
            import wandb
        Path(folder).mkdir(
            parents=True, exist_ok=True
        )  # W&B writes to the temporary folder where there is none
        self._table: Any = wandb.Table
        self._run: Any = wandb.init(
            dir=str(folder),
            project=project,
            name=name,
            id=_kept_in(Path(folder) / "wandb.id", uuid.uuid4().hex[:16]),
            resume="allow",
            config=dict(config or {}),
            mode="offline" if offline else "online",
            # Without these W&B wraps standard output, under the console's live line, and prints a page at the end.
            settings=wandb.Settings(silent=True, console="off"),
        )

        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def metrics(self, step: int, metrics: Sequence[Metric]) -> None:
        """Log every key."""
        self._run.log({"step": step, **reduce_metrics(metrics)})

    def samples(self, step: int, title: str, groups: Sequence[Group], texts: Sequence[Sequence[str]]) -> None:
        """Log a table of prompt, completion and reward."""
        rows = [
            [group.prompt.text, text, group.scores[index].reward if group.scores else None]
            for group, group_texts in zip(groups, texts, strict=True)
            for index, text in enumerate(group_texts)
        ]
        table = self._table(columns=["prompt", "completion", "reward"], data=rows)
        # Not committed: the metrics of this step are still to come, and go into the same row.
        self._run.log({"step": step, f"samples/{title}": table}, commit=False)

    def summary(self, values: Mapping[str, object]) -> None:
        """Write the values into the run's summary."""
        self._run.summary.update(dict(values))

    def close(self) -> None:
        """Finish the run; safe to call twice."""
        self._run.finish()
