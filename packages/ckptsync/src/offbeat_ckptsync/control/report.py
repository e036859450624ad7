"""One sync's figures, from the clocks of those who took part."""

from __future__ import annotations

import time
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from offbeat_ckptsync.values import Echo, Flip, Phase, Sent, SyncOffer, SyncReport

if TYPE_CHECKING:
    from collections.abc import Mapping


def make_report(
    offer: SyncOffer,
    walls: Mapping[Phase, float],
    sent: Sent,
    echoes: Mapping[str, list[Echo]],
    flips: Mapping[str, Flip],
) -> SyncReport:
    """Return the report of a committed sync.

    Durations come from several clocks, of the manager (`walls`), the source (`sent`) and the members; only
    differences on one clock are taken, so machines need not agree on the time.
    """
    total_s = sum(walls.values())
    gb_per_s, limit_gb_per_s = sent.num_bytes / total_s / 1e9, memcpy_gb_per_s()
    return SyncReport(
        version=offer.version,
        transport=sent.transport or offer.transport,
        why=sent.why,
        num_members=len(flips),
        num_tensors=len(offer.manifest.specs),
        num_buckets=len(sent.bucket_digests),
        num_bytes=sent.num_bytes,
        begin_s=walls[Phase.BEGIN],
        transfer_s=walls[Phase.TRANSFER],
        verify_s=walls[Phase.VERIFY],
        flip_s=walls[Phase.FLIP],
        commit_s=walls[Phase.COMMIT],
        total_s=total_s,
        gather_s=sent.gather_s,
        pack_s=sent.pack_s,
        wire_s=sent.wire_s,
        digest_s=sent.digest_s,
        receiver_digest_s=max((echo.digest_s for ranks in echoes.values() for echo in ranks), default=0.0),
        pause_s=max(flip.pause_s for flip in flips.values()),
        load_s=max(flip.load_s for flip in flips.values()),
        worst_gap_s=max((flip.gap_s for flip in flips.values() if flip.gap_s is not None), default=None),
        gb_per_s=gb_per_s,
        phases=phases_of(walls, sent, flips),
        limit_gb_per_s=limit_gb_per_s,
        fraction_of_limit=gb_per_s / limit_gb_per_s,
        members=dict(flips),
        wire_bytes=sent.wire_bytes,
        rank_bytes={f"{e.member}/{e.rank}": e.num_bytes for ranks in echoes.values() for e in ranks},
        received_bytes={f"{e.member}/{e.rank}": e.wire_bytes for ranks in echoes.values() for e in ranks},
    )


@cache
def memcpy_gb_per_s() -> float:
    """Return what one thread of this process copies, in GB/s: the best of a few copies of 32 MiB, made once, in some 30 ms."""
    source, target = (np.ones(_PROBE_BYTES, dtype=np.uint8) for _ in range(2))
    best_s = float("inf")
    for _ in range(4):
        mark = time.perf_counter()
        np.copyto(target, source)
        best_s = min(best_s, time.perf_counter() - mark)
    return _PROBE_BYTES / best_s / 1e9


_PROBE_BYTES = 32 << 20


def phases_of(walls: Mapping[Phase, float], sent: Sent, flips: Mapping[str, Flip]) -> dict[str, float]:
    """Split the walls into the phases of `SyncReport`; they sum to the walls."""
    slowest = max(flips.values(), key=lambda flip: flip.pause_s)
    # Packing may run while the source gathers: only what is left of the source's time counts.
    pack_s = min(sent.pack_s, sent.send_s - sent.gather_s)
    return {
        "begin": walls[Phase.BEGIN],
        "gather": sent.gather_s,
        "pack": pack_s,
        "wire": sent.send_s - sent.gather_s - pack_s,
        "verify": walls[Phase.TRANSFER] - sent.send_s + walls[Phase.VERIFY],
        "drain": slowest.drain_s,
        "load": slowest.load_s,
        "flip": walls[Phase.FLIP] - slowest.drain_s - slowest.load_s,
        "commit": walls[Phase.COMMIT],
    }
