"""New weights for vLLM, through its own calls and a weight-transfer backend in its workers.

With low-rank matrices in the settings vLLM serves them through its own LoRA layers, and every request names them; see
`lora`. The backend then gets A and B alone. vLLM forgets all of them when an update session ends, so there the session is
opened once and stays open: `finish` only sets the version, and `close` is refused.

Low-rank matrices in vLLM: one slot of its LoRA layers, filled with zeros at the start and by every update.

All requests name the LoRA `LORA_ID`, so those in flight go on under what an update puts there. The weight-transfer
backend learns from `additional_config["offbeat"]["adapter"]` what to expect: {"id", "rank", "alpha", "targets"}. vLLM is never
let read a folder again after the start: the one that the LoRA is named with is gone, so that one that vLLM has
forgotten ends the engine instead of being answered for by an older one.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportMissingTypeStubs=false
# vLLM types its interfaces in part.

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from offbeat_rollout.errors import ConfigError, EngineStateError, UpdateRefused
from offbeat_rollout.interface import WorkerUpdates
from offbeat_rollout.toolkit.weight_files import folder_lora_specs, folder_specs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping

    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

    from offbeat_rollout.config import LoraConfig
    from offbeat_rollout.types import WeightSpec
    from offbeat_rollout.vllm.config import VllmConfig


T = TypeVar("T")


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

    ranks = [rank for rank in get_args(MaxLoRARanks) if rank >= lora.rank]
    if not ranks:
        raise ConfigError(f"vllm: `lora.rank` is {lora.rank}; it takes at most {max(get_args(MaxLoRARanks))}")
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": min(ranks),
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


async def answer_of(call: Coroutine[Any, Any, T], what: str, timeout_s: float) -> T:
    """Return what vLLM answers to `call`.

    Raises:
        EngineStateError: no answer within `timeout_s`, the engine's `request_timeout_s`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except TimeoutError:
        raise EngineStateError(
            f"vLLM did not answer `{what}` within {timeout_s} s (`request_timeout_s`)"
        ) from None


class VllmUpdates(WorkerUpdates):
    """The updates of one `VllmEngine`."""

    def __init__(
        self,
        config: VllmConfig,
        running: Callable[[], AsyncLLM],
        flipped: Callable[[int, bool], Awaitable[None]],
    ) -> None:
        """Call `running()`; `flipped(version, recompute_kv)` tells the engine what its workers serve from now on."""
        self._config = config
        self._running = running
        self._flipped = flipped
        self._specs: list[WeightSpec] = []
        self._session_open = False

    def reset(self) -> None:
        """Forget the session of an engine that is no more."""
        self._session_open = False

    async def specs(self) -> list[WeightSpec]:
        """Return what the model folder holds, in the dtype served; no engine has to run for it."""
        if not self._specs:
            self._specs = await asyncio.to_thread(_specs_of, self._config)
        return list(self._specs)

    async def init(self, info: Mapping[str, object]) -> None:
        """Hand the backend its init info."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info=dict(info))
        await self._call(self._running().init_weight_transfer_engine(request), "init")

    async def begin(self) -> None:
        """Open a session; with low-rank matrices, the first time only."""
        if not (self._is_lora and self._session_open):
            await self._call(self._running().start_weight_update(), "begin")
            self._session_open = True

    async def update(self, request: Mapping[str, object]) -> None:
        """Hand the backend its update info."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        update = WeightTransferUpdateRequest(update_info=dict(request))
        try:
            await self._call(self._running().update_weights(update), "update")
        except BaseException:
            self._session_open = False  # vLLM closes it when an update fails
            raise

    async def finish(self, version: int | None = None, *, recompute_kv: bool = False) -> None:
        """Close the session, label the weights, and let the engine begin anew what must not see old keys and values."""
        llm = self._running()
        label = None if version is None else str(version)
        if not self._is_lora:
            await self._call(llm.finish_weight_update(weight_version=label), "finish")
        elif label is not None:
            await self._call(llm.update_weight_version(label), "finish")
        if version is not None:
            await self._flipped(version, recompute_kv)

    async def close(self) -> None:
        """Let the backend go; refused with low-rank matrices."""
        if self._is_lora:
            raise UpdateRefused(
                "vLLM would forget the low-rank matrices it serves; `stop` the engine instead of closing its updates"
            )
        await self._call(self._running().shutdown_weight_transfer_engine(), "close")

    @property
    def _is_lora(self) -> bool:
        return bool(self._config.lora.rank)

    async def _call(self, call: Coroutine[Any, Any, None], what: str) -> None:
        try:
            await answer_of(call, what, self._config.request_timeout_s)
        except EngineStateError:
            raise
        except Exception as error:
            why = str(error)
            if UpdateRefused.MARK in why:
                raise UpdateRefused(why.replace(UpdateRefused.MARK, "")) from error
            raise EngineStateError(f"vLLM's worker failed in `{what}`: {why}") from error


def _specs_of(config: VllmConfig) -> list[WeightSpec]:
    return folder_lora_specs(config) if config.lora.rank else folder_specs(config.model_path, config.dtype)
