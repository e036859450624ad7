"""Whether the weights of a run are numbers, before processes load them: NaN and infinity spread to every answer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from offbeat_engine.capabilities import Refusal
from offbeat_engine.toolkit.hf.weight_files import WeightFiles
from offbeat_recipes.plan.algorithm import algorithm_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from offbeat_recipes.settings.tree import RunConfig

_MAX_NAMED = 3


def weight_refusals(config: RunConfig, found: Iterable[Refusal]) -> Iterator[Refusal]:
    """Refuse model folders whose weights hold NaN or infinity, those of roles too, unless `found` refuses a folder already."""
    if any(one.setting in ("model.path", "algorithm") for one in found):
        return
    own = [] if config.model.random_init else [("", config.model.path)]
    roles = [(name, spec.path) for name, spec in algorithm_of(config).roles().items()]
    for name, path in (*own, *roles):
        odd = _odd_weights(Path(path)) if path else ""
        if odd:
            yield Refusal(
                "algorithm" if name else "model.path",
                f"{f'its {name}, {path}: ' if name else ''}weights hold NaN or infinity: {odd}",
                "copy or download them again, or use those of a run that had not gone astray",
            )


def _odd_weights(folder: Path) -> str:
    files = WeightFiles.find(folder)
    odd = {} if files is None else files.non_finite()
    named = [f"`{name}` in {file.name}" for name, file in odd.items()]
    more = [f"and {len(named) - _MAX_NAMED} more"] if len(named) > _MAX_NAMED else []
    return ", ".join([*named[:_MAX_NAMED], *more])
