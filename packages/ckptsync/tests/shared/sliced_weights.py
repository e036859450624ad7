"""Weights, and what each rank of a tensor-parallel replica needs of them."""

from __future__ import annotations

import torch

from offbeat_ckptsync.values import Cut


def weights_of(seed):
    rng = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=rng)  # noqa: E731
    embed = normal(51, 8)
    return {
        "embed": embed,
        "norm": normal(16),
        "qkv": normal(24, 16).bfloat16(),
        "o": normal(16, 24).t().contiguous().t(),
        "up": normal(40, 16),
        "down": normal(16, 40),
        "empty": torch.empty(0, 16),
        "large": normal(33, 70),
        "head": embed,
    }


def split(size, num_ranks):
    """Return start and length of each rank's share; the last ones get less, or nothing."""
    chunk = -(-size // num_ranks)
    starts = [min(rank * chunk, size) for rank in range(num_ranks)]
    return [(start, min(chunk, size - start)) for start in starts]


def tp_layouts(num_ranks):
    """Return the layouts of a tensor-parallel replica: columns, rows, a fused one of three, replicated norms."""
    layouts = {rank: {} for rank in range(num_ranks)}
    for name, size, dim in (
        ("embed", 51, 0),
        ("up", 40, 0),
        ("down", 40, 1),
        ("o", 24, 1),
        ("large", 33, 0),
        ("head", 51, 0),
    ):
        for rank, (start, length) in enumerate(split(size, num_ranks)):
            layouts[rank][name] = (Cut(dim=dim, start=start, length=length),)
    for rank, (start, length) in enumerate(split(8, num_ranks)):
        layouts[rank]["qkv"] = tuple(Cut(dim=0, start=third + start, length=length) for third in (0, 8, 16))
    return layouts


def sliced(weights, layout):
    """Slice in the plain way."""
    got = {}
    for name, tensor in weights.items():
        cuts = layout.get(name)
        if cuts is None:
            got[name] = tensor
        elif cuts:
            got[name] = torch.cat(
                [tensor.narrow(cut.dim, cut.start, cut.length) for cut in cuts], cuts[0].dim
            )
    return got
