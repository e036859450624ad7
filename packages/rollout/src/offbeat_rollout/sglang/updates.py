"""New weights for SGLang: checked here, written to shared memory, loaded by the server while it rests, and proven before it goes on.

The server loads in place, from a safetensors file, by `/update_weights_from_disk`, which takes any names and says success;
`proof` says what is to be held against its word. Until the server is asked to load, everything that is wrong is `UpdateRefused`
and nothing has changed; from then on the weights may be torn, and an engine whose update failed serves no more.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# safetensors is typed in part.

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from offbeat_rollout.errors import ConfigError, EngineStateError, UpdateRefused
from offbeat_rollout.interface import TensorUpdates
from offbeat_rollout.sglang.arguments import model_settings
from offbeat_rollout.sglang.proof import Layout, NotProvableError, Proof, differing, held_by_ranks
from offbeat_rollout.weight_files import folder_files, folder_specs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractAsyncContextManager

    import torch

    from offbeat_rollout.sglang.client import Client
    from offbeat_rollout.sglang.config import SglangConfig
    from offbeat_rollout.types import WeightSpec

_FILE = "model.safetensors"


class SglangUpdates(TensorUpdates):
    """The updates of one `SglangEngine`."""

    def __init__(
        self,
        config: SglangConfig,
        client: Callable[[], Client],
        memory: Callable[[], Path],
        resting: Callable[[int, bool], AbstractAsyncContextManager[None]],
    ) -> None:
        """Speak to `client()`, which reads in the folder `memory()`.

        Within `resting(version, recompute_kv)` the server rests, and after it serves `version`.
        """
        self._config = config
        self._client = client
        self._memory = memory
        self._resting = resting
        self._specs: list[WeightSpec] = []
        self._proof: Proof | None = None
        # What each rank must hold of the tensors that were prepared last, and where those lie.
        self._prepared: tuple[object, list[dict[str, str]]] | None = None
        self._one_at_a_time = asyncio.Lock()  # SGLang would give one update the answer to another, and end

    async def specs(self) -> list[WeightSpec]:
        """Return what the model folder holds, in the dtype served; no engine has to run for it."""
        if not self._specs:
            self._specs = await asyncio.to_thread(
                lambda: folder_specs(self._config.model_path, self._config.dtype)
            )
        return list(self._specs)

    async def prove_folder(self) -> None:
        """Hold what the server loaded at its start against the model folder, and so the rules of the proof.

        Raises:
            ConfigError: what SGLang holds of this model cannot be told.
            EngineStateError: it is not what is in the folder.
        """
        config, text = self._config, model_settings(self._config.model_path)
        given = [name for name, *_ in await self.specs()]
        layout = Layout(
            on_gpu=config.device == "cuda",
            num_ranks=config.tensor_parallel_size,
            num_kv_heads=int(text.get("num_key_value_heads") or text.get("num_attention_heads") or 0),
        )
        held = await self._held()
        try:
            self._proof = Proof(held[0], given, layout, tied=bool(text.get("tie_word_embeddings")))
        except NotProvableError as error:
            raise ConfigError(
                f"sglang: what SGLang holds cannot be told from the model folder: {error}; updates could not be proven. "
                "Use rollout=vllm"
            ) from error
        await self._require(await asyncio.to_thread(self._of_folder, self._proof), held)

    async def prepare(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See `TensorUpdates`: hashes them, which takes seconds a GiB."""
        whole = dict(tensors)
        refuse_unless(await self.specs(), whole)
        assert self._proof is not None  # made at the start
        self._prepared = None
        expected = await asyncio.to_thread(self._proof.expected, whole.__getitem__)
        self._prepared = _which(whole, version), expected

    async def load(
        self, tensors: Iterable[tuple[str, torch.Tensor]], version: int, *, recompute_kv: bool = False
    ) -> None:
        """See `TensorUpdates`; the server rests while it loads and hashes what it has loaded."""
        whole = dict(tensors)
        specs = await self.specs()
        refuse_unless(specs, whole)
        assert self._proof is not None  # made at the start
        async with self._one_at_a_time:
            which, expected = self._prepared or (None, [])
            if which != _which(whole, version):  # what was written there meanwhile fails the proof
                expected = await asyncio.to_thread(self._proof.expected, whole.__getitem__)
            self._prepared = None
            with TemporaryDirectory(dir=self._memory(), ignore_cleanup_errors=True) as folder:
                await asyncio.to_thread(self._write, Path(folder), whole)
                async with self._resting(version, recompute_kv):
                    body = {
                        "model_path": folder,
                        "weight_version": str(version),
                        # Requests that keep their keys and values hold the cache: SGLang cannot flush it then. What it has
                        # of older weights is found under their salt alone.
                        "flush_cache": recompute_kv,
                    }
                    said = await self._client().post("/update_weights_from_disk", body)
                    if said.get("success") is not True:
                        raise EngineStateError(f"SGLang failed to load weights: {said.get('message', said)}")
                    await self._require(expected, await self._held())

    def _write(self, folder: Path, whole: dict[str, torch.Tensor]) -> None:
        """Write `whole` and look at what is there now."""
        import torch
        from safetensors.torch import load_file, save_file

        # Tied or strided tensors are no files of their own: what they share is written as often as it is named.
        save_file(
            {name: one.detach().cpu().clone().contiguous() for name, one in whole.items()}, folder / _FILE
        )
        found = load_file(folder / _FILE)
        wrong = [name for name, one in whole.items() if not torch.equal(_bytes(found[name]), _bytes(one))]
        if wrong:
            raise UpdateRefused(
                f"{folder}: {wrong[:5]} are not what was written; look at the machine's memory"
            )

    async def _held(self) -> list[dict[str, str]]:
        said = await self._client().post("/weights_checker", {"action": "checksum"})
        if said.get("success") is not True:
            raise EngineStateError(f"SGLang's /weights_checker failed: {said}")
        try:
            return held_by_ranks(said, self._config.tensor_parallel_size)
        except NotProvableError as error:
            raise EngineStateError(f"SGLang's {error}") from error

    async def _require(self, expected: list[dict[str, str]], held: list[dict[str, str]]) -> None:
        wrong = differing(expected, held)
        if wrong:
            raise EngineStateError(
                f"SGLang does not hold what it was given: {len(wrong)} of {len(expected[0])} parameters differ, "
                f"among them {wrong[:5]} (/weights_checker)"
            )

    def _of_folder(self, proof: Proof) -> list[dict[str, str]]:
        import torch
        from safetensors import safe_open

        places, dtype = folder_files(self._config.model_path), getattr(torch, self._config.dtype)

        def tensor(name: str) -> torch.Tensor:
            with cast("Any", safe_open)(places[name], framework="pt") as file:
                found = file.get_tensor(name)
            return found.to(dtype) if found.is_floating_point() else found

        return proof.expected(tensor)


def _which(whole: dict[str, torch.Tensor], version: int) -> object:
    return version, {name: tensor.data_ptr() for name, tensor in whole.items()}


def refuse_unless(specs: list[WeightSpec], whole: dict[str, torch.Tensor]) -> None:
    """Refuse a set that is not what `specs` say: a tensor of another shape would end SGLang's server.

    Raises:
        UpdateRefused: naming what does not fit.
    """
    wanted = {name: (shape, dtype) for name, shape, dtype in specs}
    other = sorted(wanted.keys() ^ whole.keys())
    if other:
        raise UpdateRefused(
            f"unknown or missing tensors: {other[:5]} of {len(other)}; the old weights go on serving"
        )
    for name, tensor in whole.items():
        found = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if found != wanted[name]:
            raise UpdateRefused(
                f"{name!r} has shape and dtype {found}, expected {wanted[name]}; the old weights go on serving"
            )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
