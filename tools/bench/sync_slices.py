#!/usr/bin/env python3
"""How long the begin of a sync takes where many ranks get slices of many tensors, and how long the manager's event loop stands still.

    uv run tools/bench/sync_slices.py [--repeats 3]

36,800 tensors (92 layers of 128 experts with three matrices each, and the rest of a layer) for 64 ranks in eight replicas elsewhere,
twice: each expert whole on one rank of a replica, and every matrix cut in eight. One JSON object on stdout, of the first sync
and of the next with the same replicas: seconds, seconds of CPU, and the longest time between two turns of the loop, on the wall and (which other processes
lengthen less) of this process's CPU, and of that of the loop's own thread; and the longest that Python's search for cycles took, which
holds up everybody. What a line (a socket, Ray) takes to carry the requests is not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import time
from statistics import median
from typing import TYPE_CHECKING, ClassVar

from offbeat_ckptsync.config import SyncConfig
from offbeat_ckptsync.control.carried import CarriedMember
from offbeat_ckptsync.control.sync import Run, Target
from offbeat_ckptsync.plan.manifest import make_manifest
from offbeat_ckptsync.seams import Source
from offbeat_ckptsync.threads import in_thread
from offbeat_ckptsync.values import Cut, Layout, Registration, Sent, SyncOffer, TensorSpec
from offbeat_ckptsync.wire import plain_as

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat_ckptsync.wire import Json

NUM_LAYERS, NUM_EXPERTS, NUM_REPLICAS, NUM_RANKS = 92, 128, 8, 8
EXPERT = {"gate_proj": (768, 2048), "up_proj": (768, 2048), "down_proj": (2048, 768)}
BUCKET_BYTES = 512 << 20


def specs() -> list[TensorSpec]:
    """Return what a trainer of such a model offers."""
    rest = {f"part{i}": (2048, 2048) for i in range(16)}
    return [
        TensorSpec(name=f"layers.{layer}.{name}.weight", shape=shape, dtype="bfloat16")
        for layer in range(NUM_LAYERS)
        for name, shape in [
            *((f"experts.{e}.{part}", shape) for e in range(NUM_EXPERTS) for part, shape in EXPERT.items()),
            *rest.items(),
        ]
    ]


def whole_experts(rank: int, offered: list[TensorSpec]) -> Layout:
    """Return the layout of a rank that holds an eighth of the experts, each whole."""

    def mine(name: str) -> bool:
        return int(name.split(".")[3]) % NUM_RANKS == rank

    return {spec.name: () for spec in offered if ".experts." in spec.name and not mine(spec.name)}


def eighths(rank: int, offered: list[TensorSpec]) -> Layout:
    """Return the layout of a rank that holds an eighth of every matrix."""
    return {
        spec.name: (Cut(dim=0, start=rank * (spec.shape[0] // NUM_RANKS), length=spec.shape[0] // NUM_RANKS),)
        for spec in offered
    }


class Offers(Source):
    """A source that offers, and no more."""

    def __init__(self, offered: list[TensorSpec]) -> None:
        self._offered = offered

    async def offer(self, version: int, members: list[str]) -> SyncOffer:
        """Offer, with a manifest made anew each time, as one is that came over a wire."""
        manifest = await in_thread(lambda: make_manifest(self._offered), name="manifest")
        return SyncOffer(
            sync_id=f"s{version}", version=version, manifest=manifest, bucket_bytes=BUCKET_BYTES,
            transport="broadcast", endpoint={},
        )  # fmt: skip

    async def send(self, offer: SyncOffer) -> Sent:
        """Nothing is sent."""
        raise AssertionError(offer.sync_id)

    async def abort(self, sync_id: str) -> None:
        """Nothing is sent."""


def replica(name: str, layouts: object) -> CarriedMember:
    """Return a replica elsewhere that says what its ranks need, as JSON, and agrees to every offer."""
    answers: dict[str, Json] = {"layouts": {"ranks": layouts}, "begin": {"held": ""}}

    async def call(op: str, request: Json) -> Json:
        assert request or op == "layouts"
        return {"ok": answers[op]}

    return CarriedMember(Registration(name=name, role="member"), call)


class Heart:
    """Beats in an event loop and knows the longest time between two beats: wall, CPU of all threads, and of the loop's own.

    And the longest collection of garbage meanwhile, which stops all threads.
    """

    _CLOCKS: ClassVar = {
        "loop": time.perf_counter,
        "loop_cpu": time.process_time,
        "loop_own_cpu": time.thread_time,
    }

    def __init__(self) -> None:
        self._worst_s = dict.fromkeys([*self._CLOCKS, "collection"], 0.0)
        self._collects_since = 0.0
        gc.callbacks.append(self._collecting)
        self._task = asyncio.create_task(self._beat(), name="heart")

    async def _beat(self) -> None:
        last = {name: clock() for name, clock in self._CLOCKS.items()}
        while True:
            await asyncio.sleep(_BEAT_S)
            now = {name: clock() for name, clock in self._CLOCKS.items()}
            for name, since in last.items():
                slept_s = _BEAT_S if name == "loop" else 0.0
                self._worst_s[name] = max(self._worst_s[name], now[name] - since - slept_s)
            last = now

    def _collecting(self, when: str, _: dict[str, int]) -> None:
        now = time.perf_counter()
        if when == "start":
            self._collects_since = now
        else:
            self._worst_s["collection"] = max(self._worst_s["collection"], now - self._collects_since)

    def stop(self) -> dict[str, float]:
        """Return each of these, in ms."""
        self._task.cancel()
        gc.callbacks.remove(self._collecting)
        return {name: seconds * 1e3 for name, seconds in self._worst_s.items()}


_BEAT_S = 0.001


async def measure(layout_of: Callable[[int, list[TensorSpec]], Layout], repeats: int) -> dict[str, float]:
    """Begin two syncs, several times, each time with replicas that nobody knows yet; return medians, and the worst standstill."""
    offered, config = specs(), SyncConfig(begin_timeout_s=600.0)
    layouts = plain_as(list[Layout], [layout_of(rank, offered) for rank in range(NUM_RANKS)])
    gc.freeze()  # what replicas hold is in their own processes
    found: dict[str, list[float]] = {}
    for turn in range(repeats):
        members = {
            name: replica(name, layouts) for name in (f"replica-{turn}-{i}" for i in range(NUM_REPLICAS))
        }
        for version, which in ((1, "first"), (2, "next")):
            run = Run(Offers(offered), config, members, Target(version=version, check=lambda _: None))
            heart, cpu, wall = Heart(), time.process_time(), time.perf_counter()
            await run.begin()
            found.setdefault(f"{which}_s", []).append(time.perf_counter() - wall)
            found.setdefault(f"{which}_cpu_s", []).append(time.process_time() - cpu)
            for name, worst_ms in heart.stop().items():
                found.setdefault(f"{which}_{name}_ms", []).append(worst_ms)
    return {name: max(each) if name.endswith("_ms") else median(each) for name, each in found.items()}


def main() -> int:
    """Measure both ways of cutting."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    answer = {name: asyncio.run(measure(layout_of, repeats)) for name, layout_of in WAYS.items()}
    sys.stdout.write(json.dumps({"load_before": os.getloadavg()[0], **answer}) + "\n")
    return 0


WAYS = {"experts": whole_experts, "eighths": eighths}

if __name__ == "__main__":
    sys.exit(main())
