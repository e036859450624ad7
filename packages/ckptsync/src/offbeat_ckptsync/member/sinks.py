"""Where verified weights go: a torch module, or a plain dictionary."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from offbeat_ckptsync.errors import ManifestError
from offbeat_ckptsync.member.copying import Pair, copy_all, is_plain
from offbeat_ckptsync.member.shards import is_distributed, layout_of, local_part
from offbeat_ckptsync.plan.manifest import dtype_name, dtype_of, make_manifest, manifest_of, require_match
from offbeat_ckptsync.seams import WeightSink, WeightSource
from offbeat_ckptsync.values import Manifest, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

    from offbeat_ckptsync.values import Layout


class ModuleSource(WeightSource):
    """The weights of a torch module as a source: parameters and persistent buffers, tied ones under each name once.

    For a model in one process. A sharded engine brings its own source.
    """

    tensors_stay = True  # they are the live ones

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def manifest(self) -> Manifest:
        """Return what `tensors` will yield."""
        return manifest_of(distinct_tensors(self._module))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors themselves, detached; nothing is copied."""
        yield from distinct_tensors(self._module)


class CastSource(WeightSource):
    """Another source's floating tensors in one dtype, converted as they are sent: fp32 master weights as bfloat16, say.

    What is not floating, and what has the dtype already, goes as it is.
    """

    def __init__(self, source: WeightSource, dtype: str) -> None:
        """Send what `source` yields in the floating `dtype`, a torch name such as "bfloat16".

        Raises:
            ManifestError: torch has no such dtype, or it is not floating.
        """
        self._source = source
        self._dtype = dtype_of(dtype)
        if not self._dtype.is_floating_point:
            raise ManifestError(f"cast to {dtype}: only floating dtypes can be sent in place of others")

    def manifest(self) -> Manifest:
        """Return the other source's manifest with the dtypes that are sent."""
        return make_manifest(
            dataclasses.replace(spec, dtype=dtype_name(self._dtype))
            if dtype_of(spec.dtype).is_floating_point
            else spec
            for spec in self._source.manifest().specs
        )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the other source's tensors, converted one at a time."""
        for name, tensor in self._source.tensors():
            yield name, tensor.to(self._dtype) if tensor.is_floating_point() else tensor


class ModuleSink(WeightSink):
    """Loads into a torch module, in place: optimizers, views and captured graphs keep their tensors.

    Tied weights are expected under their first name only; the other names follow because they share storage.
    """

    def __init__(self, module: torch.nn.Module, *, allow_cast: bool = False) -> None:
        """Load into `module`; with `allow_cast` floating tensors are converted to the module's dtypes."""
        self._module = module
        self._allow_cast = allow_cast

    def expected(self) -> Manifest:
        """Return the module's own tensors, tied ones once, sharded ones in their whole shape."""
        return manifest_of(distinct_tensors(self._module))

    def layout(self) -> Layout:
        """Return what this rank holds of parameters that are DTensors; raises `ManifestError` as `layout_of`."""
        return layout_of(distinct_tensors(self._module))

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Check everything, then copy everything; raises `ManifestError` before the first copy."""
        copy_all([pair for _, pair in self._pairs(tensors, version)])

    def _pairs(
        self, tensors: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> list[tuple[torch.Tensor, Pair]]:
        """Return each of the module's own tensors with what it holds here and what it is given; raises `ManifestError`."""
        given = dict(tensors)
        live = [(name, owner, local_part(owner.detach())) for name, owner in owned_tensors(self._module)]
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

    With `expected` given, it takes these tensors only; with `layout`, of those named there only these slices.
    """

    def __init__(self, expected: Manifest | None = None, layout: Layout | None = None) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.version: int | None = None
        self._expected = expected
        self._layout = {} if layout is None else layout

    def layout(self) -> Layout:
        """Return the slices asked for; the dictionary then holds those."""
        return self._layout

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


def distinct_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and persistent buffers, detached; of those that share one tensor only the first name."""
    for name, tensor in owned_tensors(module):
        yield name, tensor.detach()


def owned_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what `distinct_tensors` does, as the module holds it."""
    seen: set[tuple[int, int]] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        key = (id(tensor), tensor.data_ptr())
        if key not in seen:
            seen.add(key)
            yield name, tensor
