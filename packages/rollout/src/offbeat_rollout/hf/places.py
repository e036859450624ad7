"""Where the tensors of a checkpoint lie in a model that holds them otherwise: transformers 5 fuses the experts of a mixture.

Transformers undoes that in `save_pretrained`. The same undoing, of numbers that name places, tells where in a live weight each tensor
of the checkpoint lies; if that is a lattice, it is a view of the live weight, and what is written into it is served.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# transformers' models and conversions are typed loosely.

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from offbeat_rollout.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A tensor of the checkpoint in the live weight `held`: `torch.as_strided` of that, whole and in order."""

    held: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def view(self, live: torch.Tensor) -> torch.Tensor:
        """Return what of `live` it is."""
        assert live.is_contiguous()
        return live.as_strided(self.shape, self.strides, live.storage_offset() + self.offset)


def places_of(model: PreTrainedModel, live: Mapping[str, torch.Tensor]) -> dict[str, Place]:
    """Return the place of each tensor of a checkpoint of `model` in `live`; empty where those are the live weights themselves.

    Raises:
        ConfigError: one is no view of a live weight.
    """
    if not _converts(model):
        return {}
    return {
        name: place for held, weight in live.items() for name, place in _within(model, held, weight).items()
    }


def _converts(model: PreTrainedModel) -> bool:
    if find_spec("transformers.conversion_mapping") is None:
        return False
    from transformers.conversion_mapping import get_model_conversion_mapping

    return bool(get_model_conversion_mapping(model, add_legacy=False))


def _within(model: PreTrainedModel, held: str, weight: torch.Tensor) -> dict[str, Place]:
    from transformers.core_model_loading import revert_weight_conversion

    revert: Any = revert_weight_conversion
    with torch.no_grad():
        parts: dict[str, torch.Tensor] = revert(model, {held: weight})
        if len(parts) == 1:
            ((name, only),) = parts.items()
            if (
                only.data_ptr() == weight.data_ptr() and only.shape == weight.shape
            ):  # another name, if anything
                return {name: Place(held=held, shape=tuple(weight.shape), strides=weight.stride(), offset=0)}
        numbered = torch.arange(weight.numel()).view(weight.shape)
        return {
            name: _lattice(held, name, part, numbered)
            for name, part in revert(model, {held: numbered}).items()
        }


def _lattice(held: str, name: str, part: torch.Tensor, numbered: torch.Tensor) -> Place:
    """Return the place of a tensor whose numbers are `part` among those of the live weight."""
    first = int(part.flatten()[0])
    strides = tuple(
        int(part.select(dim, 1).flatten()[0]) - first if size > 1 else 1
        for dim, size in enumerate(part.shape)
    )
    place = Place(held=held, shape=tuple(part.shape), strides=strides, offset=first)
    if min(strides) < 0 or not torch.equal(place.view(numbered), part):
        raise ConfigError(
            f"{name!r} of the checkpoint is no part of {held!r} that lies in order: the hf adapter cannot update it; use vllm"
        )
    return place
