"""Weights & Biases. Needs the extra `offbeat-trainer[wandb]`."""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false
# (wandb is optional: where it is not installed nothing of it has a type)

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat_trainer.errors import TrainerError
from offbeat_trainer.metrics import reduce_metrics

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat_trainer.data.types import Group
    from offbeat_trainer.metrics import Metric


class WandbReporter:
    """A `Reporter` into a Weights & Biases run of its own, with the id that `folder` keeps in `wandb.id`.

    Offline it writes below `folder` only, to be sent later with `wandb sync`. A run that goes on in its folder goes on there; steps
    that it repeats are drawn again: they are an axis of their own, while W&B's own counter drops what does not rise.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        project: str,
        name: str,
        config: Mapping[str, object] | None = None,
        offline: bool = True,
    ) -> None:
        """Start a run shown as `name`, with its settings `config`, or go on with the one of this `folder`.

        Raises:
            TrainerError: wandb is not installed.
        """
        try:
            import wandb
        except ImportError as missing:
            raise TrainerError(
                "the W&B reporter needs the package wandb; install `offbeat-trainer[wandb]` or leave the reporter out"
            ) from missing
        Path(folder).mkdir(
            parents=True, exist_ok=True
        )  # W&B writes to the temporary folder where there is none
        self._table: Any = wandb.Table
        self._run: Any = wandb.init(
            dir=str(folder),
            project=project,
            name=name,
            id=_own_id(Path(folder) / "wandb.id"),
            resume="allow",
            config=dict(config or {}),
            mode="offline" if offline else "online",
            # Without these W&B wraps standard output, under the console's live line, and prints a page at the end.
            settings=wandb.Settings(silent=True, console="off"),
        )

        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def phase(self, name: str, detail: str = "") -> None:
        """Nothing: phases are for people."""

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


def _own_id(kept: Path) -> str:
    if not kept.exists():
        kept.write_text(uuid.uuid4().hex[:16])
    return kept.read_text()
