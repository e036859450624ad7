"""What an engine compares with the plain forward before anything is trained, and how: two short sequences, and a judge.

How long sequences may be before a model's rotary frequencies change under them.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from offbeat_engine.batch import train_batch
from offbeat_engine.config import Dtype, Refusal
from offbeat_engine.errors import BatchError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from offbeat_engine.batch import TrainBatch


# Tokens of the longer of the two sequences at most and at least, the part of them that the shorter has, and the beginning
# that they share: with `share_prefixes` it is computed once. The longer one is what lies between the shorter and the row's
# first token, so whatever reaches back no further than that, or works in blocks of less, shows in the shorter one.
_LONGEST, _LEAST = 200, 20
_SHORTER = 0.7
SHARED = 6
_MAX_NAMED = 5
# What rounding explains, of the largest and of the mean difference: so much, and so much of the mean magnitude. In float32
# right paths came to 1e-6 here; in bfloat16 to 0.014 and 0.004, and to 0.98 and 0.012 where a router chose other experts for
# single tokens. So there the mean judges; what leaks is looked for between equal shapes, strictly.
_LARGEST = {Dtype.FLOAT32: (1e-3, 1e-4), Dtype.BFLOAT16: (2.0, 0.03)}
_LARGEST_STRICT = {Dtype.FLOAT32: (1e-4, 1e-5), Dtype.BFLOAT16: (0.05, 0.003)}
_MEAN = {Dtype.FLOAT32: (2e-4, 2e-5), Dtype.BFLOAT16: (0.03, 0.005)}


def find_non_finite(named: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """Return which weights of this rank's part of a model are no numbers, or None.

    A sum is not finite if one of its numbers is not: one pass, and no memory. What a large sum alone made infinite is looked at
    again.
    """
    with torch.no_grad():
        odd = [
            name
            for name, weight in named
            if weight.is_floating_point()
            and not weight.sum(dtype=torch.float32).isfinite()
            and not weight.isfinite().all()
        ]
    if not odd:
        return None
    return (
        f"{len(odd)} weights of the model hold NaN or infinity, such as {', '.join(f'`{name}`' for name in odd[:_MAX_NAMED])}: "
        "its files are damaged, or come of a run that had gone astray; use others"
    )


class Judge:
    """Compares answers under a mask with what rounding in `dtype` explains; `strict` where the shapes are the same."""

    def __init__(self, dtype: Dtype, mask_BT: torch.Tensor, *, strict: bool = False) -> None:
        self._dtype = dtype
        self._mask_BT = mask_BT
        self._largest = (_LARGEST_STRICT if strict else _LARGEST)[dtype]
        self._factor = 0.1 if strict else 1.0

    def compare(
        self,
        plain_BT: torch.Tensor,
        own_BT: torch.Tensor,
        left: str = "Hugging Face's forward",
        right: str = "this engine",
    ) -> str | None:
        """Return both figures of the worst token in words, or None where they agree."""
        plain_M, own_M = plain_BT[self._mask_BT], own_BT[self._mask_BT]
        gap_M = (plain_M - own_M).abs().nan_to_num(nan=torch.inf)
        scale = float(plain_M.abs().mean())
        largest = self._largest[0] + self._largest[1] * scale
        mean = self._factor * (_MEAN[self._dtype][0] + _MEAN[self._dtype][1] * scale)
        if float(gap_M.max()) <= largest and float(gap_M.mean()) <= mean:
            return None
        worst = int(gap_M.argmax())
        return (
            f"a probe token has {float(plain_M[worst]):.6g} by {left} and {float(own_M[worst]):.6g} by {right} "
            f"({float(gap_M[worst]):.2g} apart, {float(gap_M.mean()):.2g} on average; rounding explains {largest:.2g} and {mean:.2g})"
        )


def probe(config: Any, budget: int) -> TrainBatch:
    """Return two sequences that begin alike, of ordinary tokens, all asked for but the first, for a model of `config` (of its text).

    They fit into one micro-batch of `budget` tokens: in two of them nothing would be packed.
    """
    limit = sequence_limit(config) or getattr(config, "max_position_embeddings", None) or _LONGEST
    longer = max(2, min(_LONGEST, max(_LEAST, budget // 2), int(limit)))
    lengths = [longer, max(2, int(_SHORTER * longer))]
    special = {
        value for key, value in vars(config).items() if key.endswith("token_id") and isinstance(value, int)
    }
    ordinary = [token for token in range(min(config.vocab_size, 4096)) if token not in special]
    draw = torch.Generator().manual_seed(0)
    picked_BT = torch.randint(len(ordinary), (2, lengths[0]), generator=draw)
    picked_BT[1, :SHARED] = picked_BT[0, :SHARED]
    lengths_B = torch.tensor(lengths)
    position_T = torch.arange(lengths[0])
    real_BT = position_T[None] < lengths_B[:, None]
    ids_BT = torch.tensor(ordinary)[picked_BT]
    return train_batch(
        input_ids=torch.where(real_BT, ids_BT, 0),
        lengths=lengths_B,
        loss_mask=real_BT & (position_T[None] > 0),
    )


def answers(logits_TV: torch.Tensor, ids_T: torch.Tensor, head: str) -> torch.Tensor:
    """Return the log-probability of each token after the first, or the value before it, on the CPU."""
    if head == "value":
        return logits_TV[:-1, 0].cpu()
    return logits_TV[:-1].log_softmax(-1).gather(1, ids_T[1:, None]).squeeze(1).cpu()


@contextmanager
def without_bars() -> Generator[None]:
    """Without transformers' progress bars, whose lines would fill a log."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            logging.enable_progress_bar()


# Those that follow the longest position of a forward pass.
_GROWING_ROPES = frozenset({"dynamic", "longrope", "su"})


def sequence_limit(config: Any) -> int | None:
    """Return the tokens up to which rotary frequencies stay as they are, or None where they always do.

    Dynamic scaling and longrope (arXiv 2402.13753) choose frequencies by the longest position of a forward pass, so beyond
    this a log-probability would depend on the sequences that happen to share its micro-batch.
    """
    ropes = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    each = (
        [ropes]
        if "rope_type" in ropes or "type" in ropes
        else [rope for rope in ropes.values() if isinstance(rope, dict)]
    )
    limits = [
        rope.get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", None)
        or config.max_position_embeddings
        for rope in each
        if rope.get("rope_type", rope.get("type")) in _GROWING_ROPES
    ]
    return min(map(int, limits), default=None)


def refusals(config: Any, longest: int) -> Iterator[Refusal]:
    """Yield why sequences of `longest` tokens would not be exact; part of an engine's `check`."""
    limit = sequence_limit(config)
    if limit is not None and longest > limit:
        yield Refusal(
            setting="max_sequence_tokens",
            reason="the model changes its rotary frequencies with the longest sequence of a micro-batch "
            f"beyond {limit} tokens, and sequences of up to {longest} are to come",
            remedy=f"keep to {limit} tokens, or use a rope whose frequencies are fixed",
        )


def check_lengths(batch: TrainBatch, limit: int | None) -> None:
    """Raise `BatchError` where a sequence is longer than a model's `sequence_limit`."""
    longest = int(batch["lengths"].max()) if len(batch["lengths"]) else 0
    if limit is not None and longest > limit:
        raise BatchError(
            f"a sequence has {longest} tokens, and beyond {limit} this model changes its rotary frequencies with the "
            "longest sequence of a micro-batch; give shorter ones, or use a rope whose frequencies are fixed"
        )
