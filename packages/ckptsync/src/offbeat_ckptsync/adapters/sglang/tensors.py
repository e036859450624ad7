"""Tensors as SGLang's session takes them: a pickled list of names and tensors, in base64 (`load_format` null)."""

from __future__ import annotations

import base64
import pickle
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

_PART_BYTES = 64 << 20


def in_parts(whole: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Yield `whole` in bodies of about 64 MiB; only SGLang's side reads pickles, and through a list of what it allows."""
    part: list[tuple[str, torch.Tensor]] = []
    num_bytes = 0
    for name, tensor in whole.items():
        part.append((name, tensor.detach().cpu().clone()))  # a view would bring the whole of its memory along
        num_bytes += tensor.nbytes
        if num_bytes >= _PART_BYTES:
            yield _body(part)
            part, num_bytes = [], 0
    if part:
        yield _body(part)


def _body(part: list[tuple[str, torch.Tensor]]) -> str:
    return base64.b64encode(pickle.dumps(part)).decode()
