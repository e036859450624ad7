"""Weights in the names and shapes of their checkpoint, for families that transformers keeps otherwise in memory.

transformers 5 fuses the experts of a mixture into one tensor and renames modules as it loads, and undoes it in
`save_pretrained`. The same undoing runs here on one weight at a time, so that nothing needs the whole model: that
is right exactly when no exported weight is made of several held ones, which `check` finds out on empty tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from offbeat_engine.errors import ConfigError

Shapes = dict[str, tuple[int, ...]]


def converts(hf: Any) -> bool:
    """Return whether transformers converts this family's weights as it loads and saves them."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return bool(get_model_conversion_mapping(hf, add_legacy=False))


def original(hf: Any, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what `save_pretrained` would write for `tensor` held as `name`; only where `hf` `converts`."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(hf, {name: tensor})


def original_shapes(hf: Any, name: str, shape: tuple[int, ...]) -> Shapes:
    """Return names and shapes of `original`, computing nothing."""
    parts = original(hf, name, torch.empty(shape, device="meta"))
    return {part: tuple(tensor.shape) for part, tensor in parts.items()}


def check(hf: Any, held: Shapes) -> None:
    """Make sure that the weights `held` in memory can be exported one at a time.

    Raises:
        ConfigError: an exported weight is joined from several held ones.
    """
    if not converts(hf):
        return
    from transformers.core_model_loading import revert_weight_conversion

    empty = {name: torch.empty(shape, device="meta") for name, shape in held.items()}
    together = {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(hf, empty).items()}
    singly: Shapes = {}
    for name, shape in held.items():
        singly |= original_shapes(hf, name, shape)
    odd = sorted({*together.items()} ^ {*singly.items()})
    if odd:
        raise ConfigError(
            f"{type(hf).__name__} joins several weights into one of its files' (such as `{odd[0][0]}`), which "
            "`named_weights` cannot do one at a time; use another family"
        )
