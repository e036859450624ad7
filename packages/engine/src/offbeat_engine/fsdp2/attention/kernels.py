"""The attention kernels: for each, what transformers is told, how tokens are laid out for it, and what it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat_engine.config import Dtype
from offbeat_engine.fsdp2.attention import packed as attention
from offbeat_engine.fsdp2.attention.packing import RowInputs, padded_inputs
from offbeat_engine.fsdp2.attention.varlen import plan_varlen

if TYPE_CHECKING:
    from offbeat_engine.fsdp2.attention.packed import PlanRows
    from offbeat_engine.fsdp2.config import Fsdp2Config
    from offbeat_engine.toolkit.hf.layouts import MakeInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One way to attend.

    `padded` is its name in transformers for padded rows, `plan` how it sees packed ones; None where it takes none. Packed
    rows enter through `attention.NAME` whatever the kernel, so what that refuses is refused with all of them.
    """

    padded: str | None = None
    plan: PlanRows | None = None
    shares: bool = False  # whether a prefix that sequences have in common may lie in the row once
    cuda_dtypes: frozenset[Dtype] = frozenset(Dtype)
    capability: tuple[int, int] = (0, 0)  # of a GPU, at least


KERNELS = {
    "eager": Kernel(padded="eager"),
    "sdpa": Kernel(padded="sdpa", plan=attention.plan_padded, shares=True),
    "varlen": Kernel(
        plan=plan_varlen, shares=True, cuda_dtypes=frozenset({Dtype.BFLOAT16}), capability=(8, 0)
    ),
}


def kernel_name(config: Fsdp2Config) -> str:
    """Return which of `KERNELS` the setting `attention` comes to; "auto" follows settings alone, not what is installed."""
    if config.attention != "auto":
        return config.attention
    on_cuda = config.device == "cuda" and config.dtype in KERNELS["varlen"].cuda_dtypes
    return "varlen" if config.packing and on_cuda else "sdpa"


def implementation(config: Fsdp2Config) -> str:
    """Return the transformers attention implementation that `config` comes to."""
    if config.packing:
        return attention.NAME
    name = KERNELS[kernel_name(config)].padded
    assert name is not None  # refused before
    return name


def inputs_maker(config: Fsdp2Config) -> MakeInputs:
    """Return the arrangement of tokens that goes with the attention of `config`."""
    kernel = KERNELS[kernel_name(config)]
    if not config.packing:
        return padded_inputs
    assert kernel.plan is not None  # refused before
    # Ranks that share a row cut it where they like, which a shared prefix does not survive.
    alone = config.sequence_parallel_size == 1
    return RowInputs(kernel.plan, share=config.share_prefixes and kernel.shares and alone)


def refusal(config: Fsdp2Config) -> tuple[str, str] | None:
    """Return why the kernel of `config` cannot go with its other settings, and what to do; None if it can."""
    name = kernel_name(config)
    kernel = KERNELS[name]
    if config.packing and kernel.plan is None:
        return f"{name} attention knows no packed rows", "set `packing: false`, or use auto"
    if not config.packing and kernel.padded is None:
        return f"{name} attention knows packed rows only", "set `packing: true`, or use auto"
    if config.device == "cuda" and config.dtype not in kernel.cuda_dtypes:
        return f"{name} on a CUDA device takes {', '.join(sorted(kernel.cuda_dtypes))}", "use auto"
    return None


def missing_here(config: Fsdp2Config, capability: tuple[int, int]) -> str | None:
    """Return what this process lacks for the kernel of `config` on a GPU of that compute capability, None if nothing."""
    name = kernel_name(config)
    kernel = KERNELS[name]
    if capability < kernel.capability:
        have, need = (".".join(map(str, each)) for each in (capability, kernel.capability))
        return f"{name} needs a GPU of compute capability {need}, this one has {have}"
    return None
