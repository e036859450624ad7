#!/usr/bin/env python3
"""What a sync over shared memory could take at best on this machine: two processes that do its moves and nothing else.

    uv run tools/bench/bound.py MIB FILE

The source copies its weights into a shared segment and digests what it copies, block by block; the receiver digests each bucket
when it is there, compares, and then copies all of it into memory of its own. Two threads on each side, one tensor, no plan, no
transaction. Turns with digests and without alternate. What it found goes to FILE, one JSON object; `sync.py --only bound` runs it.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import median

import numpy as np
import xxhash

BUCKET, BLOCK, SPAN = 64 << 20, 512 << 10, 16 << 20  # as `sync.py` measures `shm`, and as it packs and loads
TURNS, THREADS = 7, 2
LIMIT_S = 60.0
DIGEST_BYTES = 16
NO_DIGEST = bytes(DIGEST_BYTES)


def main() -> int:
    """Measure both ways and write them down."""
    num_bytes = int(sys.argv[1]) << 20
    file = os.memfd_create("bound")
    os.ftruncate(file, num_bytes)
    segment = mmap.mmap(file, num_bytes)
    with suppress(OSError):
        segment.madvise(mmap.MADV_HUGEPAGE)
    shared = np.frombuffer(segment, dtype=np.uint8)
    shared[:] = 0
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    near.settimeout(LIMIT_S)
    far.settimeout(LIMIT_S)
    if os.fork() == 0:  # no thread runs yet
        code = 1
        try:
            near.close()
            receive(far, shared)
            code = 0
        finally:
            os._exit(code)
    far.close()
    weights = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
    with ThreadPoolExecutor(THREADS) as pool:
        took = [_sync(near, pool, weights, shared, digests=turn % 2 == 0) for turn in range(2 * TURNS + 2)]
    near.close()
    _, status = os.wait()
    seconds, without = median(took[2::2]), median(took[3::2])
    figures = {
        "seconds": seconds,
        "seconds_unverified": without,
        "gb_per_s": num_bytes / seconds / 1e9,
        "verify_share": (seconds - without) / seconds,
    }
    Path(sys.argv[2]).write_text(json.dumps(figures))
    return os.waitstatus_to_exitcode(status)


def _sync(
    line: socket.socket,
    pool: ThreadPoolExecutor,
    weights: np.ndarray,
    shared: np.ndarray,
    *,
    digests: bool,
) -> float:
    weights += 1

    def pack(start: int) -> None:
        end = min(start + BUCKET, len(weights))
        running = xxhash.xxh3_128()
        for first in range(start, end, BLOCK):
            block = weights[first : min(first + BLOCK, end)]
            np.copyto(shared[first : first + len(block)], block)
            if digests:
                running.update(block.data)
        line.send(start.to_bytes(8) + (running.digest() if digests else NO_DIGEST))

    mark = time.perf_counter()
    list(pool.map(pack, range(0, len(weights), BUCKET)))
    if line.recv(8) != b"loaded":
        raise ValueError("the receiver found other bytes than were sent")
    return time.perf_counter() - mark


def receive(line: socket.socket, shared: np.ndarray) -> None:
    """Take syncs until the source hangs up."""
    own = np.zeros(len(shared), dtype=np.uint8)

    def is_sent(start: int, told: bytes) -> bool:
        return told == NO_DIGEST or xxhash.xxh3_128_digest(shared[start : start + BUCKET].data) == told

    def load(start: int) -> None:
        num_bytes = min(SPAN, len(own) - start)
        ctypes.memmove(own.ctypes.data + start, shared.ctypes.data + start, num_bytes)

    with ThreadPoolExecutor(THREADS) as pool:
        while True:
            proofs: list[Future[bool]] = []
            for _ in range(0, len(shared), BUCKET):
                if not (told := line.recv(64)):
                    return
                proofs.append(pool.submit(is_sent, int.from_bytes(told[:8]), told[8:]))
            if all(proof.result() for proof in proofs):
                list(pool.map(load, range(0, len(own), SPAN)))
                line.send(b"loaded")
            else:
                line.send(b"other")


if __name__ == "__main__":
    sys.exit(main())
