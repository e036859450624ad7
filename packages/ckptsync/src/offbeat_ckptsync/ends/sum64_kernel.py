"""`sum64` in one kernel, which reads every byte once: what `sum64.sum64` computes with torch in sixteen passes.

Imported where there is a GPU; Triton comes with torch's wheels for CUDA.
"""

# Triton is not typed.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportMissingParameterType=false, reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false
# ruff: noqa: ANN001 -- what Triton compiles is no Python

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

_BLOCK_WORDS = 2048
_BLOCKS = 8  # that one program takes, one after the other


@triton.jit
def _add(words, total, num_words, first_word, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):  # noqa: ANN202 -- as above
    first = tl.program_id(0).to(tl.int64) * BLOCK * BLOCKS
    found = tl.zeros([BLOCK], dtype=tl.uint64)
    for block in range(BLOCKS):
        place = first + block * BLOCK + tl.arange(0, BLOCK)
        there = place < num_words
        word = tl.load(words + place, mask=there, other=0).to(tl.uint64, bitcast=True)
        z = word + (first_word + place + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
        z = (z ^ (z >> 32)) * 0xD6E8FEB86659FD93
        z = (z ^ (z >> 29)) * 0xA0761D6478BD642F
        found += tl.where(there, z ^ (z >> 32), 0)
    tl.atomic_add(total, tl.sum(found, axis=0).to(tl.int64, bitcast=True))


def add_words(words: torch.Tensor, total: torch.Tensor, first: int) -> None:
    """Add the z of each of `words`, int64 on a GPU, which are words `first` and on, to `total`, int64 []; waits for nothing."""
    programs = triton.cdiv(words.numel(), _BLOCK_WORDS * _BLOCKS)
    if programs:
        _add[(programs,)](words, total, words.numel(), first, BLOCK=_BLOCK_WORDS, BLOCKS=_BLOCKS)
