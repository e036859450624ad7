"""TensorBoard. Needs the extra `offbeat-trainer[tensorboard]`."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportMissingImports=false
# pyright: reportUntypedFunctionDecorator=false, reportAttributeAccessIssue=false
# (torch.utils.tensorboard is untyped and absent where the extra is not installed)

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from offbeat_trainer.errors import TrainerError
from offbeat_trainer.metrics import reduce_metrics

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from offbeat_trainer.data.types import Group
    from offbeat_trainer.metrics import Metric


class TensorBoardReporter:
    """A `Reporter` into an event file: one scalar per key; settings, samples and summary as text."""

    def __init__(self, folder: str | Path, *, config: Mapping[str, object] | None = None) -> None:
        """Write to `folder`, the settings `config` of the run first.

        Raises:
            TrainerError: TensorBoard is not installed.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as missing:
            raise TrainerError(
                "the TensorBoard reporter needs the package tensorboard; "
                "install `offbeat-trainer[tensorboard]` or leave the reporter out"
            ) from missing
        self._folder, self._writer_class = str(folder), SummaryWriter
        self._writer = SummaryWriter(self._folder)
        if config:
            self._writer.add_text("config", _block(config))

    def truncate_after(self, step: int) -> None:
        """Let readers hide what is there of later steps: a run that goes on from `step` says it again. The settings stay."""
        self._writer.close()
        self._writer = self._writer_class(self._folder, purge_step=max(step, 0) + 1)

    def phase(self, name: str, detail: str = "") -> None:
        """Nothing: phases are for people."""

    def metrics(self, step: int, metrics: Sequence[Metric]) -> None:
        """Write one scalar per key."""
        for key, value in reduce_metrics(metrics).items():
            self._writer.add_scalar(key, value, step)

    def samples(self, step: int, title: str, groups: Sequence[Group], texts: Sequence[Sequence[str]]) -> None:
        """Write the completions as one text, prompt by prompt."""
        parts = [
            f"    {group.prompt.text}\n\n" + "\n\n".join(f"    → {text}" for text in group_texts)
            for group, group_texts in zip(groups, texts, strict=True)
        ]
        self._writer.add_text(f"samples/{title}", "\n\n---\n\n".join(parts), step)

    def summary(self, values: Mapping[str, object]) -> None:
        """Write the values as text."""
        self._writer.add_text("summary", _block(values))
        self._writer.flush()

    def close(self) -> None:
        """Flush and close; safe to call twice."""
        self._writer.close()


def _block(values: Mapping[str, object]) -> str:
    return f"```\n{json.dumps(dict(values), indent=2, default=str)}\n```"
