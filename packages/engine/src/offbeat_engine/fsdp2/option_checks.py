"""What must hold before adapters, freezing, compiling and deterministic kernels can work."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from offbeat_engine.capabilities import Refusal
from offbeat_engine.fsdp2.kernels import compiler_missing
from offbeat_engine.fsdp2.lora import has_peft
from offbeat_engine.fsdp2.model import wants_flash

if TYPE_CHECKING:
    from collections.abc import Iterator

    from offbeat_engine.config import EngineConfig

# What cuBLAS documents as giving the same bits on every run.
_WORKSPACES = (":4096:8", ":16:8")


def option_refusals(config: EngineConfig) -> Iterator[Refusal]:
    """Yield every reason why an option of `config` cannot work here."""
    yield from _lora(config)
    yield from _kernels(config)


def _lora(config: EngineConfig) -> Iterator[Refusal]:
    lora = config.lora
    if lora.rank < 0:
        yield Refusal(
            setting="lora.rank", reason=f"must not be negative, got {lora.rank}", remedy="use 8, or 0"
        )
    if lora.rank <= 0:
        return
    if not has_peft():
        yield Refusal(
            setting="lora.rank",
            reason="adapters need the peft package",
            remedy="install offbeat-engine[lora]",
        )
    if not 0 <= lora.dropout < 1:
        yield Refusal(
            setting="lora.dropout", reason=f"must lie in [0, 1), got {lora.dropout:g}", remedy="use 0"
        )
    if lora.alpha <= 0:
        yield Refusal(
            setting="lora.alpha", reason=f"must be positive, got {lora.alpha:g}", remedy="use twice the rank"
        )
    if config.freeze:
        yield Refusal(
            setting="freeze",
            reason="with adapters the whole base is frozen already",
            remedy="leave `freeze` empty, or narrow `lora.targets`",
        )


def _kernels(config: EngineConfig) -> Iterator[Refusal]:
    missing = compiler_missing(config.device) if config.compile else None
    if missing is not None:
        yield Refusal(setting="compile", reason=missing, remedy="install it, or set `compile: false`")
    if not config.deterministic:
        return
    # Only cuBLAS reads it, once, when it starts: whoever launches the process must set it, so it is looked at here.
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")  # noqa: TID251
    if config.device == "cuda" and workspace not in _WORKSPACES:
        yield Refusal(
            setting="deterministic",
            reason=f"cuBLAS needs CUBLAS_WORKSPACE_CONFIG to be one of {', '.join(_WORKSPACES)}, got {workspace}",
            remedy="set it in the environment that starts the ranks",
        )
    if wants_flash(config) and not config.packing:
        yield Refusal(
            setting="deterministic",
            reason="flash-attention on padded rows does not hear of it",
            remedy="set `packing: true`, or `attention: sdpa`",
        )
