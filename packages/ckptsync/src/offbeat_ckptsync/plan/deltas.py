"""Lossless deltas: which words of a bucket changed since another content, and how they are put on the wire. Pure.

A bucket is seen as runs: stretches of tensors whose elements have one size, its word (of 16 bytes: 8). Words are compared
by their bits, so NaN and -0.0 are numbers like any other. For the words that differ a delta holds, little-endian, each
part filled up with zeros to a multiple of 8 bytes:

    counts  uint32, one per block of 65536 words (a run starts a block of its own): how many of them changed
    places  uint16, one per change: its place in its block, rising
    values  per run a part of its own: the new words, in the order of their places

An applied delta is proven by the digest of the whole bucket, so it carries none itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from offbeat_ckptsync.errors import DigestError
from offbeat_ckptsync.plan.buckets import round_up
from offbeat_ckptsync.plan.manifest import dtype_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat_ckptsync.values import Bucket, Manifest

BLOCK_WORDS = 1 << 16
"""Words whose places fit into 16 bits."""

_PART = 8  # parts begin at multiples of this, so that each can be viewed as its own dtype
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Bytes `start` to `end` of a bucket, in words of `word_bytes`."""

    start: int
    end: int
    word_bytes: int

    @property
    def num_words(self) -> int:
        """Its length in words."""
        return (self.end - self.start) // self.word_bytes

    @property
    def num_blocks(self) -> int:
        """How many counts stand for it."""
        return round_up(self.num_words, BLOCK_WORDS) // BLOCK_WORDS

    def words(self, payload: torch.Tensor) -> torch.Tensor:
        """Return its words in the uint8 bytes of the bucket, as integers; a view."""
        return payload[self.start : self.end].view(_WORDS[self.word_bytes])


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What changed in one bucket: `payload`, uint8, is None where too much did, so that the bucket goes whole."""

    payload: torch.Tensor | None
    num_changed: int
    num_words: int


def runs_of(manifest: Manifest, bucket: Bucket) -> tuple[Run, ...]:
    """Return the runs of a bucket, in order; padding inside a run counts as words of it (it never changes)."""
    runs: list[Run] = []
    for piece in bucket.pieces:
        word = min(dtype_of(manifest.specs[piece.spec_index].dtype).itemsize, max(_WORDS))
        end = piece.bucket_offset + piece.num_bytes
        if runs and runs[-1].word_bytes == word:
            runs[-1] = Run(start=runs[-1].start, end=end, word_bytes=word)
        else:
            runs.append(Run(start=piece.bucket_offset, end=end, word_bytes=word))
    return tuple(runs)


def find_delta(
    runs: Sequence[Run], base: torch.Tensor, fresh: torch.Tensor, *, max_fraction: float = 1.0
) -> Delta:
    """Return what turns the bucket `base` into `fresh`, both uint8 of one size, on one device.

    There is no payload where more than `max_fraction` of the words changed, or where it would not be smaller than
    the bucket itself.
    """
    find = _find_on_host if fresh.device.type == "cpu" else _find_on_device
    num_words = sum(run.num_words for run in runs)
    found = find(runs, base, fresh, max_fraction * num_words)
    changed = [int(of_run.counts.sum()) for of_run in found]
    parts = _parts(runs, changed)
    payload = None
    if sum(changed) <= max_fraction * num_words and parts[-1] < fresh.numel():
        payload = _encode(runs, found, fresh, parts)
    return Delta(payload=payload, num_changed=sum(changed), num_words=num_words)


def apply_delta(runs: Sequence[Run], delta: torch.Tensor, bucket: torch.Tensor) -> None:
    """Turn `bucket`, uint8, which holds a copy of the base, into what `delta` was made from, in place.

    Raises:
        DigestError: `delta` is no delta of such a bucket. What `bucket` then holds is good for nothing.
    """
    num_counts = sum(run.num_blocks for run in runs)
    if delta.numel() < 4 * num_counts:
        raise DigestError(f"a delta of {delta.numel()} bytes is shorter than its {num_counts} counts")
    counts = delta[: 4 * num_counts].view(torch.int32).to(torch.int64)
    if num_counts and not 0 <= int(counts.min()) <= int(counts.max()) <= BLOCK_WORDS:
        raise DigestError(f"a delta counts more changes in a block than its {BLOCK_WORDS} words")
    of_runs = _split(counts, [run.num_blocks for run in runs])
    changed = [int(of_run.sum()) for of_run in of_runs]
    parts = _parts(runs, changed)
    if delta.numel() != parts[-1]:
        raise DigestError(
            f"a delta of {sum(changed)} changes has {delta.numel()} bytes, expected {parts[-1]}"
        )
    places = delta[parts[0] : parts[0] + 2 * sum(changed)].view(torch.int16).to(torch.int64) & 0xFFFF
    for run, of_run, of_places, start in zip(
        runs, of_runs, _split(places, changed), parts[1:-1], strict=True
    ):
        where = _firsts(run, delta.device).repeat_interleave(of_run) + of_places
        if where.numel() and int(where.max()) >= run.num_words:
            raise DigestError(f"a delta names word {int(where.max())} of {run.num_words}")
        values = delta[start : start + run.word_bytes * where.numel()].view(_WORDS[run.word_bytes])
        run.words(bucket)[where] = values


def common_base(bases: Sequence[str], held: Mapping[str, str | None]) -> tuple[str, str]:
    """Return the content, one of `bases`, that all members hold, else "" and the reason.

    `held` is what each member says it keeps a copy of, by name; nothing, or "", where it keeps none.
    """
    if not bases:
        return "", ""
    without = [name for name, content in held.items() if content not in bases]
    if without:
        return "", f"{', '.join(without)} kept no copy of what the source sent last"
    contents = {content for content in held.values() if content}
    if len(contents) != 1:
        return "", "the members kept copies of different contents"
    return contents.pop(), ""


@dataclass(slots=True)
class _Changes:
    """Of one run: how many words of each block changed, the places of those in their blocks, and what they are now."""

    counts: torch.Tensor  # int64 [num_blocks]
    places: torch.Tensor  # int16, with the bits of the unsigned numbers
    values: torch.Tensor  # the run's words


def _find_on_host(
    runs: Sequence[Run], base: torch.Tensor, fresh: torch.Tensor, most: float
) -> list[_Changes]:
    """Compare block by block, while a cache holds both; where more than `most` words changed, they are counted only."""
    found: list[_Changes] = []
    total = 0
    for run in runs:
        old, new = run.words(base).numpy(), run.words(fresh).numpy()
        counts: list[int] = []
        places, values = [np.empty(0, np.uint16)], [new[:0]]
        for start in range(0, len(new), BLOCK_WORDS):
            block = new[start : start + BLOCK_WORDS]
            differs = old[start : start + BLOCK_WORDS] != block
            counts.append(int(np.count_nonzero(differs)))
            total += counts[-1]
            if counts[-1] and total <= most:
                where = np.flatnonzero(differs)
                places.append(where.astype(np.uint16))
                values.append(block[where])
        found.append(
            _Changes(
                counts=torch.tensor(counts, dtype=torch.int64),
                places=torch.from_numpy(np.concatenate(places).view(np.int16)),
                values=torch.from_numpy(np.concatenate(values)),
            )
        )
    return found


def _find_on_device(
    runs: Sequence[Run], base: torch.Tensor, fresh: torch.Tensor, most: float
) -> list[_Changes]:
    found: list[_Changes] = []
    for run in runs:
        words = run.words(fresh)
        where = (run.words(base) != words).nonzero().flatten()
        places = where % BLOCK_WORDS
        # Above 32767 they become negative, with the bits of the unsigned number.
        places -= (places >> 15) << 16
        counts = torch.bincount(where // BLOCK_WORDS, minlength=run.num_blocks)
        found.append(_Changes(counts=counts, places=places.to(torch.int16), values=words[where]))
    return found


def _encode(
    runs: Sequence[Run], found: Sequence[_Changes], fresh: torch.Tensor, parts: list[int]
) -> torch.Tensor:
    payload = torch.zeros(parts[-1], dtype=torch.uint8, device=fresh.device)
    counted, placed = 0, parts[0]
    for run, of_run, start in zip(runs, found, parts[1:-1], strict=True):
        num_changed = of_run.values.numel()
        payload[counted : counted + 4 * run.num_blocks].view(torch.int32).copy_(of_run.counts)
        payload[placed : placed + 2 * num_changed].view(torch.int16).copy_(of_run.places)
        values = payload[start : start + run.word_bytes * num_changed]
        values.view(_WORDS[run.word_bytes]).copy_(of_run.values)
        counted += 4 * run.num_blocks
        placed += 2 * num_changed
    return payload


def _parts(runs: Sequence[Run], changed: Sequence[int]) -> list[int]:
    """Return where the places begin, where each run's values do, and the bytes of it all."""
    counts = round_up(4 * sum(run.num_blocks for run in runs), _PART)
    ends = [counts, counts + round_up(2 * sum(changed), _PART)]
    for run, number in zip(runs, changed, strict=True):
        ends.append(ends[-1] + round_up(run.word_bytes * number, _PART))
    return ends


def _split(values: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    ends = list(accumulate(sizes))
    return [values[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _firsts(run: Run, device: torch.device) -> torch.Tensor:
    return torch.arange(0, run.num_words, BLOCK_WORDS, dtype=torch.int64, device=device)
