"""Where verified weights go: a torch module, which may hold parts of them as DTensors, or a plain dictionary."""

# torch types its distributed tensors in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
import sys
import threading
from concurrent.futures import wait
from typing import TYPE_CHECKING

import torch

from offbeat_ckptsync.ends.manifest import dtype_name, make_manifest, manifest_of, require_match
from offbeat_ckptsync.ends.staging import writes_to
from offbeat_ckptsync.errors import ManifestError
from offbeat_ckptsync.seams import WeightSink, WeightSource
from offbeat_ckptsync.toolkit.threads import begun, num_movers
from offbeat_ckptsync.values import Manifest, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


_SPAN_BYTES = 16 << 20  # copied at a time, so that threads finish together

Pair = tuple[torch.Tensor, torch.Tensor]
"""A live tensor and the one to copy into it."""


class ModuleSource(WeightSource):
    """The weights of a torch module as a source: parameters and persistent buffers, tied ones under each name once.

    Of a parameter that is a DTensor (FSDP2, `distribute_tensor`) all ranks gather the whole tensor, one at a time. An engine that
    knows better brings its own source. Let no optimizer step run from `sync` until it returns: the
    tensors are read while they are sent. A step that runs all the same fails the sync, where torch counts its writes (those
    through `parameter.data` it does not count).
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.collective = any(is_distributed(tensor) for _, tensor in owned_tensors(module))
        self.tensors_stay = not self.collective  # else they are the live ones

    def manifest(self) -> Manifest:
        """Return what `tensors` will yield."""
        return manifest_of(owned_tensors(self._module))

    def writes(self) -> dict[str, int]:
        """Return torch's count of each tensor."""
        return {name: writes_to(tensor) for name, tensor in owned_tensors(self._module)}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors themselves, detached, nothing copied; of a DTensor the whole, a collective."""
        for name, owner in owned_tensors(self._module):
            tensor = owner.detach()
            yield name, tensor.full_tensor() if is_distributed(tensor) else tensor  # type: ignore[attr-defined]


class ModuleSink(WeightSink):
    """Loads into a torch module, in place: optimizers, views and captured graphs keep their tensors.

    Tied weights are expected under their first name only; the other names follow because they share storage. Of a
    parameter that is a DTensor it takes the whole tensor and copies the part that this rank holds.
    """

    def __init__(self, module: torch.nn.Module, *, allow_cast: bool = False) -> None:
        """Load into `module`; with `allow_cast` floating tensors are converted to the module's dtypes."""
        self._module = module
        self._allow_cast = allow_cast

    def expected(self) -> Manifest:
        """Return the module's own tensors, tied ones once, sharded ones in their whole shape."""
        return manifest_of(owned_tensors(self._module))

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Check everything, then copy everything; raises `ManifestError` before the first copy."""
        copy_all([pair for _, pair in self._pairs(tensors, version)])

    def _pairs(
        self, tensors: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> list[tuple[torch.Tensor, Pair]]:
        """Return each of the module's own tensors with what it holds here and what it is given; raises `ManifestError`."""
        given = dict(tensors)
        live = [(name, owner, local_part(owner.detach())) for name, owner in owned_tensors(self._module)]
        for name, owner, _ in live:
            if is_distributed(owner) and name in given:
                given[name] = _part_of(owner, name, given[name])
        if len(live) != len(given) or not all(_is_like(held, given.get(name)) for name, _, held in live):
            require_match(
                manifest_of((name, held) for name, _, held in live),
                manifest_of(given.items()),
                who=f"module ({version})",
                allow_cast=self._allow_cast,
            )
        return [(owner, (held, given[name])) for name, owner, held in live]


class AdoptingModuleSink(ModuleSink):
    """Lets a torch module serve verified weights from where they lie, where they may stay there; else it copies them.

    A flip then takes as long as changing pointers, and over `shm` all replicas of a machine share one copy of the weights;
    elsewhere two staging memories take turns, and no copy is kept for joiners or deltas. For modules that only serve:
    what looks at the old memory (views of parameters, optimizers, captured graphs) goes on seeing the old weights. A replica
    that writes into its weights all the same changes nobody else's.
    """

    def adopt(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> bool:
        """Check everything, then point the module at what fits as it is and copy the rest, as `load` does."""
        copied: list[Pair] = []
        for owner, (held, given) in self._pairs(tensors, version):
            if is_plain(held, given) and not is_distributed(owner):
                owner.data = given
            else:
                copied.append((held, given))
        copy_all(copied)
        return True


class DictSink(WeightSink):
    """Keeps a copy of the last version in `weights`; for tests and for those who take weights by hand.

    With `expected` given, it takes these tensors only.
    """

    def __init__(self, expected: Manifest | None = None) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.version: int | None = None
        self._expected = expected

    def expected(self) -> Manifest | None:
        """Return what was asked for, or None."""
        return self._expected

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace all weights at once; after an error the old ones are untouched."""
        fresh = {name: tensor.clone() for name, tensor in tensors}
        self.weights, self.version = fresh, version


def specs_of(weights: Iterable[tuple[str, tuple[int, ...], torch.dtype | str]]) -> Manifest:
    """Return the manifest of (name, shape, dtype) triples, as engines hand them out."""
    return make_manifest(
        TensorSpec(
            name=name, shape=tuple(shape), dtype=dtype if isinstance(dtype, str) else dtype_name(dtype)
        )
        for name, shape, dtype in weights
    )


def owned_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and persistent buffers as the module holds them; of those that share one tensor only the first name."""
    seen: set[tuple[int, int]] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        key = (id(tensor), tensor.data_ptr())
        if key not in seen:
            seen.add(key)
            yield name, tensor


def copy_all(pairs: list[Pair]) -> None:
    """Copy the second tensor of each pair into the first, in place; shapes are equal, dtypes may differ.

    Plain runs of bytes in host memory are shared out to threads of this call, at most four and at most one per core
    that this process may use. Torch's own threads meet after every tensor: where cores are busy each meeting waits
    for the slowest, here there is one at the end.
    """
    plain: list[Pair] = []
    with torch.no_grad():
        for live, given in pairs:
            if is_plain(live, given):
                plain.append((live, given))
            else:
                live.copy_(given)
    spans = iter([span for live, given in plain for span in _spans(live, given)])
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                span = next(spans, None)
            if span is None:
                return
            ctypes.memmove(*span)  # lets other threads run meanwhile

    helpers = [begun(work, name="copy") for _ in range(_num_threads(plain) - 1)]
    try:
        work()
    finally:
        wait(helpers)
    for helper in helpers:
        helper.result()


def _num_threads(plain: list[Pair]) -> int:
    num_bytes = sum(live.nbytes for live, _ in plain)
    return max(1, min(num_movers(), num_bytes // _SPAN_BYTES))


def is_plain(live: torch.Tensor, given: torch.Tensor) -> bool:
    """Say whether both hold the same kind of numbers in host memory, in order and without gaps."""
    host = live.device.type == given.device.type == "cpu"
    return host and _is_like(live, given) and live.is_contiguous() and given.is_contiguous()


def _is_like(live: torch.Tensor, given: torch.Tensor | None) -> bool:
    return given is not None and live.dtype == given.dtype and live.shape == given.shape


def _spans(live: torch.Tensor, given: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield where to copy to, from where, and how many bytes, of two plain tensors that outlive this.

    Addresses, not arrays: making those takes longer than copying a small tensor, and `numpy()` forbids torch for ever to resize
    a storage.
    """
    into, data, num_bytes = live.data_ptr(), given.data_ptr(), live.nbytes
    for start in range(0, num_bytes, _SPAN_BYTES):
        yield into + start, data + start, min(_SPAN_BYTES, num_bytes - start)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rank's own memory of a tensor, DTensor or not; writing to it writes to the tensor."""
    return tensor.to_local() if is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def is_distributed(tensor: torch.Tensor) -> bool:
    """Say whether it is one of torch's DTensors."""
    # Slow to import; without it there are no such tensors.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _part_of(owner: torch.Tensor, name: str, whole: torch.Tensor) -> torch.Tensor:
    """Return the part of `whole` that the DTensor `owner` holds on this rank; moves nothing between ranks."""
    mesh, placements = owner.device_mesh, owner.placements  # type: ignore[attr-defined]
    if any(each.is_partial() for each in placements):
        raise ManifestError(f"{name!r} is placed as {placements}: partial sums cannot be given values")
    distribute = sys.modules["torch.distributed.tensor"].distribute_tensor
    return local_part(distribute(whole, mesh, placements, src_data_rank=None))
