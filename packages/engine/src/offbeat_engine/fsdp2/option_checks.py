"""What must hold before adapters, freezing, compiling and deterministic kernels can work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat_engine.capabilities import Refusal
from offbeat_engine.fsdp2.lora import has_peft

if TYPE_CHECKING:
    from collections.abc import Iterator

    from offbeat_engine.config import EngineConfig


def option_refusals(config: EngineConfig) -> Iterator[Refusal]:
    """Yield every reason why an option of `config` cannot work here."""
    yield from _lora(config)


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
