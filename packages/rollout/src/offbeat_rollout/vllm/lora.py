"""Low-rank matrices in vLLM: one slot of its LoRA layers, filled with zeros at the start and by every update.

All requests name the LoRA `LORA_ID`, so those in flight go on under what an update puts there. The weight-transfer
backend learns from `additional_config["offbeat"]["adapter"]` what to expect: {"id", "rank", "alpha", "targets"}. vLLM is never
let read a folder again after the start: the one that the LoRA is named with is gone, so that one that vLLM has
forgotten ends the engine instead of being answered for by an older one.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportMissingTypeStubs=false
# vLLM types its interfaces in part.

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from offbeat_rollout.errors import ConfigError, EngineStateError

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

    from offbeat_rollout.config import LoraConfig

LORA_ID = 1
_NAME = "offbeat"


def lora_args(lora: LoraConfig) -> dict[str, Any]:
    """Return what the arguments of `AsyncLLM` have in addition; nothing without LoRA.

    Raises:
        ConfigError: the rank is above what vLLM has room for.
    """
    if not lora.rank:
        return {}
    from vllm.config.lora import MaxLoRARanks

    rooms = [room for room in get_args(MaxLoRARanks) if room >= lora.rank]
    if not rooms:
        raise ConfigError(f"vllm: `lora.rank` is {lora.rank}; it takes at most {max(get_args(MaxLoRARanks))}")
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": min(rooms),
        "additional_config": {
            "offbeat": {
                "adapter": {
                    "id": LORA_ID,
                    "rank": lora.rank,
                    "alpha": lora.alpha,
                    "targets": list(lora.targets),
                }
            }
        },
    }


def served_lora() -> LoRARequest:
    """Return what every request carries."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(_NAME, LORA_ID, "(in memory; an update session of vLLM was closed, which forgets it)")


async def serve_nothing_yet(
    llm: AsyncLLM, lora: LoraConfig, specs: list[tuple[str, tuple[int, ...], str]]
) -> None:
    """Put matrices that add nothing into vLLM's slot.

    Raises:
        EngineStateError: vLLM did not take it; its message says why.
    """
    from vllm.lora.request import LoRARequest

    with tempfile.TemporaryDirectory(prefix="offbeat-lora-") as folder:
        _write_zeros(Path(folder), lora, specs)
        try:
            await llm.add_lora(LoRARequest(_NAME, LORA_ID, folder))
        except Exception as error:
            raise EngineStateError(f"vLLM cannot serve low-rank matrices over this model: {error}") from error


def _write_zeros(folder: Path, lora: LoraConfig, specs: list[tuple[str, tuple[int, ...], str]]) -> None:
    import torch  # here: looking the adapter up must stay cheap

    zeros = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, shape, dtype in specs}
    torch.save(zeros, folder / "adapter_model.pt")
    modules = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in zeros})
    description = {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": modules,
    }
    (folder / "adapter_config.json").write_text(json.dumps(description))
