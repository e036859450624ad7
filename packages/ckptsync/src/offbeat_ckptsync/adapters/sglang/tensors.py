"""Tensors as SGLang's session takes them: a pickled list of names and tensors, in base64 (`load_format` null)."""

from __future__ import annotations

import base64
import pickle
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

_PART_BYTES = 64 << 20


def parts_of(whole: Mapping[str, torch.Tensor]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield `whole` in parts of about 64 MiB, which is what the server holds beside its weights while it loads."""
    part: list[tuple[str, torch.Tensor]] = []
    num_bytes = 0
    for name, tensor in whole.items():
        part.append((name, tensor.detach().cpu()))
        num_bytes += tensor.nbytes
        if num_bytes >= _PART_BYTES:
            yield part
            part, num_bytes = [], 0
    if part:
        yield part


def in_parts(whole: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Yield bodies of `parts_of(whole)`; only SGLang's side reads pickles, and through a list of what it allows."""
    for part in parts_of(whole):
        # A view would bring the whole of its memory along.
        copied = [(name, tensor.clone()) for name, tensor in part]
        yield base64.b64encode(pickle.dumps(copied)).decode()
