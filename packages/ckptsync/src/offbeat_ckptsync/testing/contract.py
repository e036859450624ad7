"""The contract that every transport must hold, as a table of cases."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from offbeat_ckptsync.ends.manifest import manifest_of
from offbeat_ckptsync.ends.sinks import DictSink
from offbeat_ckptsync.errors import SyncFailed
from offbeat_ckptsync.testing.fakes import (
    DictSource,
    Fault,
    FaultyTransport,
    LocalSync,
    awkward_weights,
    prints_of,
)
from offbeat_ckptsync.toolkit.config import SyncConfig, make_transport

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from offbeat_ckptsync.seams import Transport

    Tensors = dict[str, torch.Tensor]

BUCKET_BYTES = 4096
"""Small, so that small weights fill several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Weights of one kind: `make(seed)` gives the same names, shapes and dtypes for every seed, with other values."""

    name: str
    make: Callable[[int], Tensors]


def transport_contract(
    name: str,
    *,
    num_receivers: tuple[int, ...] = (1, 3),
    **settings: Any,  # noqa: ANN401 -- fields of `SyncConfig`, each of its own type
) -> Callable[..., None]:
    """Return a pytest test of every case for the transport called `name`, once per number of receivers.

    All receivers are in this process. `settings` are fields of `SyncConfig`. A transport that needs a folder finds a fresh one
    in `disk_path`.
    """
    import pytest

    @pytest.mark.parametrize("receivers", num_receivers)
    @pytest.mark.parametrize("case", [*CASES, None], ids=lambda case: "faults" if case is None else case.name)
    def test_contract(case: Case | None, receivers: int, tmp_path: Path) -> None:
        given: dict[str, Any] = {
            "disk_path": str(tmp_path),
            "begin_timeout_s": 20.0,
            "transfer_timeout_s": 30.0,
            **settings,
        }
        config = SyncConfig(transport=name, bucket_mib=BUCKET_BYTES / (1 << 20), **given)
        make = lambda: make_transport(name, config)  # noqa: E731
        if case is not None:
            asyncio.run(check_case(case, make, config, num_receivers=receivers))
        else:
            asyncio.run(check_transport(make, config, num_receivers=receivers))

    return test_contract


async def check_case(
    case: Case, make: Callable[[], Transport], config: SyncConfig, *, num_receivers: int
) -> None:
    """Sync the weights of `case` three times, changed each time, and offer a renamed tensor in between.

    What arrives is what was sent, bit for bit, in every receiver; the renamed tensor is refused by its name while the
    old version stays, and the sync after it is good.

    Raises:
        AssertionError: it does not hold.
    """
    sinks = {f"replica-{i}": DictSink(manifest_of(case.make(0).items())) for i in range(num_receivers)}
    local = LocalSync(DictSource(case.make(1)), dict(sinks), config, make)
    try:
        await check_three_syncs(local, case)
    finally:
        local.close()


async def check_three_syncs(local: LocalSync, case: Case) -> None:
    """Do what `check_case` says with the members of `local`."""
    await check_good(local, 1, case.make(1))
    await check_good(local, 2, case.make(2))
    first, *_ = local.source.weights
    local.source.weights = {
        f"{name}-renamed" if name == first else name: tensor for name, tensor in case.make(9).items()
    }
    await check_refused(local, 3, f"{first}-renamed")
    await check_good(local, 3, case.make(3))


async def check_transport(make: Callable[[], Transport], config: SyncConfig, *, num_receivers: int) -> None:
    """Hold a transport to its contract on awkward weights with faults planted, receivers in this process.

    A byte flipped where it is sent or where it arrives, and a line cut in the middle, are refused while the old
    version stays; the sync after each is good.

    Raises:
        AssertionError: it does not hold.
    """
    sinks = {f"replica-{i}": DictSink(manifest_of(awkward_weights(0).items())) for i in range(num_receivers)}
    faults = [Fault("corrupt", 1, times=0), Fault("die", 2, times=0), Fault("corrupt", 0, times=0)]
    local = LocalSync(
        DictSource(awkward_weights(1)),
        dict(sinks),
        config,
        lambda: FaultyTransport(
            FaultyTransport(make(), on_send=faults[2]), on_receive=faults[0], on_send=faults[1]
        ),
    )
    try:
        await check_good(local, 1, awkward_weights(1))
        for version, fault in enumerate(faults, start=2):
            local.source.weights = awkward_weights(version)
            fault.left = 1
            await check_refused(local, version, "bucket")
            await check_good(local, version, awkward_weights(version))
    finally:
        local.close()


async def check_good(local: LocalSync, version: int, weights: Tensors) -> None:
    """Sync `weights` as `version`; every member then serves them, bit for bit."""
    local.source.weights = weights
    report = await local.manager.sync(version)
    assert report.version == version
    want = (version, prints_of(weights))
    for name, got in (await local.serving()).items():
        assert got == want, f"{name} serves {got}, not {want}"


async def check_refused(local: LocalSync, version: int, named: str) -> None:
    """Try to sync what the source holds; that fails, says `named`, and every member serves what it served."""
    before = await local.serving()
    told = ""
    try:
        await local.manager.sync(version)
    except SyncFailed as error:
        told = str(error)
    assert named in told, f"version {version} was to be refused, naming {named}; said: {told or 'nothing'}"
    after = await local.serving()
    assert after == before
    assert {served for served, _ in after.values()} == {version - 1}


def _normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _full(seed: int) -> Tensors:
    shapes = {"embed_tokens.weight": (61, 24), "norm.weight": (24,), "lm_head.weight": (61, 24)}
    for layer in range(3):
        shapes |= {
            f"layers.{layer}.self_attn.qkv.weight": (72, 24),
            f"layers.{layer}.mlp.up.weight": (96, 24),
            f"layers.{layer}.mlp.down.weight": (24, 96),
            f"layers.{layer}.norm.weight": (24,),
        }
    return {name: _normal(seed + i, *shape).bfloat16() for i, (name, shape) in enumerate(shapes.items())}


def _lora(seed: int) -> Tensors:
    """An adapter alone: the base model is neither sent nor expected."""
    return {
        f"base_model.model.layers.{layer}.q_proj.lora_{side}.weight": _normal(seed + layer, *shape)
        for layer in range(4)
        for side, shape in (("A", (8, 96)), ("B", (96, 8)))
    }


def _tied(seed: int) -> Tensors:
    shared = _normal(seed, 50, 16)
    return {"embed.weight": shared, "block.weight": _normal(seed + 1, 16, 16), "head.weight": shared}


def _mixed_dtypes(seed: int) -> Tensors:
    rng = torch.Generator().manual_seed(seed)
    floats = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn)
    ints = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    weights = {str(dtype): _normal(seed, 37).to(dtype) for dtype in floats}
    weights |= {str(dtype): torch.randint(0, 100, (37,), generator=rng).to(dtype) for dtype in ints}
    return weights | {
        "bool": _normal(seed, 37) > 0,
        "complex": torch.complex(_normal(seed, 7), _normal(seed, 7)),
    }


def _zero_size(seed: int) -> Tensors:
    return {
        "first": torch.empty(0), "a": _normal(seed, 3), "middle": torch.empty(4, 0, 2, dtype=torch.int64),
        "b": _normal(seed + 1, 5), "last": torch.empty(0, 7, dtype=torch.bfloat16),
    }  # fmt: skip


def _odd_sizes(seed: int) -> Tensors:
    sizes = (1, 2, 3, 5, 7, 15, 17, 255, 257, 1021, 4095, 4096, 4097)
    rng = torch.Generator().manual_seed(seed)
    weights = {f"u{size}": torch.randint(0, 256, (size,), generator=rng).to(torch.uint8) for size in sizes}
    return weights | {"scalar": _normal(seed, 1).reshape(())}


def _larger_than_a_bucket(seed: int) -> Tensors:
    return {
        "small": _normal(seed, 9),
        "large": _normal(seed + 1, 5 * BUCKET_BYTES // 4 + 3),
        "after": _normal(seed, 4),
    }


def _non_contiguous(seed: int) -> Tensors:
    base = _normal(seed, 40, 60)
    return {
        "transposed": base.t(), "every_third": base.reshape(-1)[::3], "inner": base[3:17, 5:31],
        "expanded": _normal(seed + 1, 1, 33).expand(4, 33), "permuted": base.reshape(4, 10, 60).permute(2, 0, 1),
    }  # fmt: skip


_TABLE: dict[str, Callable[[int], Tensors]] = {
    "full": _full,
    "lora": _lora,
    "tied": _tied,
    "mixed_dtypes": _mixed_dtypes,
    "zero_size": _zero_size,
    "odd_sizes": _odd_sizes,
    "larger_than_a_bucket": _larger_than_a_bucket,
    "non_contiguous": _non_contiguous,
}

CASES = tuple(Case(name=name, make=make) for name, make in _TABLE.items())
"""What `check_case` takes; `transport_contract` runs them all."""
