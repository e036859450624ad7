"""The generation interface. Adapters translate it to vLLM, SGLang or Transformers and add nothing.

Below it: what every adapter checks before it starts anything, so that all refuse the same things in the same words.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from offbeat_rollout.config import RolloutConfig, read_json, require_config
from offbeat_rollout.errors import ConfigError, RequestError
from offbeat_rollout.types import RolloutFeature

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Container, Iterable, Mapping, Sequence
    from typing import TypeAlias

    import torch

    from offbeat_rollout.types import (
        Completion,
        GenerateRequest,
        Health,
        PauseMode,
        RolloutCapabilities,
        SamplingParams,
        WeightSpec,
    )

    WeightUpdates: TypeAlias = "TensorUpdates | WorkerUpdates | ServerUpdates"


class TensorUpdates(ABC):
    """New weights for an engine that takes tensors, in its own process."""

    @abstractmethod
    async def specs(self) -> list[WeightSpec]:
        """Return what an update must bring, in Hugging Face names (peft's, for low-rank matrices alone)."""

    @abstractmethod
    async def load(
        self, tensors: Iterable[tuple[str, torch.Tensor]], version: int, *, recompute_kv: bool = False
    ) -> None:
        """Check the whole set, copy it between two tokens, then serve it as `version`.

        Requests under way go on, from their old keys and values unless `recompute_kv`. The tensors must not change until
        this returns.

        Raises:
            UpdateRefused: the set does not fit; no parameter changed.
        """

    async def adopt(
        self, tensors: Iterable[tuple[str, torch.Tensor]], version: int, *, recompute_kv: bool = False
    ) -> bool:
        """As `load`, but serve the tensors, in host memory, from where they lie; False: not looked at, `load` them.

        They stay as they are while they live, also if the engine writes into them.
        """
        return False


class WorkerUpdates(ABC):
    """New weights for an engine that loads them in its workers, by a backend of its library.

    A session is `begin`, any number of `update`, `finish`; an `update` that fails ends it. What an `update` carries is the
    backend's business, in plain values.
    """

    @abstractmethod
    async def specs(self) -> list[WeightSpec]:
        """Return what an update must bring, in Hugging Face names (peft's, for low-rank matrices alone)."""

    @abstractmethod
    async def init(self, info: Mapping[str, object]) -> None:
        """Give the backend in every worker what it must know once."""

    @abstractmethod
    async def begin(self) -> None:
        """Open a session."""

    @abstractmethod
    async def update(self, request: Mapping[str, object]) -> None:
        """Hand `request` to the backend in every worker.

        Raises:
            UpdateRefused: the backend raised it: no parameter changed.
            EngineStateError: the backend failed otherwise.
        """

    @abstractmethod
    async def finish(self, version: int | None = None, *, recompute_kv: bool = False) -> None:
        """End the session; what is there is served as `version` from now on, or the version stays as it is.

        Requests under way go on, from their old keys and values unless `recompute_kv`.
        """

    @abstractmethod
    async def close(self) -> None:
        """Let the backend leave all connections; generation goes on."""


class ServerUpdates(ABC):
    """New weights for a server that loads them when it is told to over HTTP.

    Who tells it comes from outside (offbeat-ckptsync's adapter, say): here is where it answers, and when it rests.
    """

    @property
    @abstractmethod
    def url(self) -> str:
        """Where it answers, on this machine."""

    @property
    @abstractmethod
    def key(self) -> str:
        """What it wants as bearer token."""

    @property
    @abstractmethod
    def folder(self) -> Path:
        """A folder that it can read, in memory where there is such a place; it goes with the server."""

    @property
    @abstractmethod
    def way(self) -> str:
        """How it is to get weights: "files", "tensors" (on GPUs by CUDA IPC) or "group" (on GPUs NCCL)."""

    @abstractmethod
    async def specs(self) -> list[WeightSpec]:
        """Return what an update must bring, in Hugging Face names."""

    @abstractmethod
    async def load(
        self, load: Callable[[], Awaitable[None]], version: int, *, recompute_kv: bool = False
    ) -> None:
        """Have the server rest, await `load()`, which lets it load and looks at what it holds, then serve that as `version`.

        Requests under way go on, from their old keys and values unless `recompute_kv`. Where `load` raises, weights may be torn:
        the engine serves no more.

        Raises:
            UpdateRefused: the server did not come to rest; `load` was not called.
        """


class RolloutEngine(ABC):
    """One generation engine: a replica.

    All methods are coroutines of one event loop. `generate` may be called concurrently; the engine batches.
    """

    Config: ClassVar[type[RolloutConfig]] = RolloutConfig

    stop_timeout_s: ClassVar[float] = 60.0
    """`stop` has ended by then, whatever the library does; whoever waits for it elsewhere waits longer."""

    def __init__(self, config: RolloutConfig) -> None:
        """Keep `config`; nothing heavy happens before `start`.

        Raises:
            ConfigError: `config` is not one of this adapter's.
        """
        self.config = require_config(config, self.Config)

    @classmethod
    @abstractmethod
    def capabilities(cls) -> RolloutCapabilities:
        """Return what this adapter can do, without importing its library."""

    @classmethod
    def check(cls, config: RolloutConfig) -> None:
        """Refuse settings and models this adapter cannot honour, without loading weights; `start` refuses the same.

        Raises:
            ConfigError: naming the setting, what came, and what is allowed.
        """
        check_config(config, cls.capabilities())

    @classmethod
    def environment(cls, config: RolloutConfig, cores: Sequence[int] = ()) -> dict[str, str]:
        """Return the environment variables the engine's process must start with; by default none.

        `cores` are the CPU cores the replica should keep to, where the library takes such a wish.
        """
        del config, cores
        return {}

    @property
    @abstractmethod
    def version(self) -> int | None:
        """Version of the weights being served; 0 for those loaded at start, None while there are none (see `sleep`)."""

    @abstractmethod
    async def start(self) -> None:
        """Load the model and become able to generate, within `start_timeout_s`."""

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> Completion:
        """Return the completion of one request.

        A request aborted by `abort` or `pause(ABORT)` returns normally with `Finish.ABORT` and its tokens so far.

        Raises:
            RequestError: the request can never be served; nothing was started.
            RequestTimeout: the engine worked on it for `request_timeout_s` without a token (queueing and pauses do not count).
            EngineStateError: the engine is not running, or makes no tokens any more.
        """

    async def generate_many(
        self, requests: Sequence[GenerateRequest], ended: Callable[[Completion], None] | None = None
    ) -> list[Completion]:
        """Return the completions of `requests`, in their order; one call for a whole batch.

        `ended` is called with each completion as it comes. The first request that fails ends the others, and its error
        is raised.
        """

        async def one(request: GenerateRequest) -> Completion:
            completion = await self.generate(request)
            if ended is not None:
                ended(completion)
            return completion

        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(one(request), name=f"generate {request.request_id}")
                    for request in requests
                ]
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None  # callers know this interface's errors, not a group of them
        return [task.result() for task in running]

    @abstractmethod
    async def abort(self, request_ids: Collection[str]) -> None:
        """End these requests now; unknown ones are ignored."""

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None:
        """Stop generating; see `PauseMode`. Requests that arrive meanwhile wait for `resume`."""

    @abstractmethod
    async def resume(self) -> None:
        """Go on generating. Harmless when not paused."""

    @abstractmethod
    async def sleep(self, level: int) -> None:
        """Release device memory: 1 offloads the weights, 2 discards them. Keys and values are dropped.

        After level 2 there is no version, on any device, and `generate` is refused until an update has brought all
        weights; `wake` alone gives memory back, not what was in it.
        """

    @abstractmethod
    async def wake(self, tags: Collection[str] | None = None) -> None:
        """Take memory back: tags "weights", "kv_cache", or all when None."""

    @abstractmethod
    def weight_updates(self) -> WeightUpdates:
        """Return the way new weights take into this engine: as tensors here, or through its library's workers."""

    @abstractmethod
    async def health(self) -> Health:
        """Say whether the engine can still generate, at once, whatever it is doing; `tokens_made` tells its progress."""

    @abstractmethod
    async def stop(self) -> None:
        """End the engine and its processes; safe to call twice."""


_GROWING_ROPES = ("dynamic", "longrope", "su")
_LEAST_TEMPERATURE = 0.01  # vLLM would draw at this one for anything between 0 and it


def check_config(config: RolloutConfig, capabilities: RolloutCapabilities) -> None:
    """Refuse settings the adapter cannot honour.

    Raises:
        ConfigError: naming the setting, what came, and what is allowed.
    """
    who = capabilities.adapter
    if config.device not in capabilities.devices:
        raise ConfigError(f"{who}: device {config.device!r}; expected one of {sorted(capabilities.devices)}")
    if config.dtype not in capabilities.dtypes:
        raise ConfigError(f"{who}: dtype {config.dtype!r}; expected one of {sorted(capabilities.dtypes)}")
    for name in ("max_model_len", "max_num_seqs", "tensor_parallel_size", "cpu_threads"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{who}: `{name}` must be >= 1, got {getattr(config, name)}")
    for name in ("start_timeout_s", "request_timeout_s"):
        if getattr(config, name) <= 0:
            raise ConfigError(f"{who}: `{name}` must be > 0 seconds, got {getattr(config, name)}")
    if config.tensor_parallel_size > 1 and RolloutFeature.TENSOR_PARALLEL not in capabilities.features:
        raise ConfigError(
            f"{who}: `tensor_parallel_size` is {config.tensor_parallel_size}; this adapter has no more than 1"
        )
    if config.record_experts:
        _check_recording(config, capabilities)
    _check_lora(config, capabilities)
    _check_tokenizer(config, capabilities)
    _check_rope(config, capabilities)


def _check_rope(config: RolloutConfig, capabilities: RolloutCapabilities) -> None:
    """Refuse sequences beyond which frequencies are others: engines choose them by the batch, or by `max_model_len` for all."""
    shape = _shape(config)
    ropes: dict[str, Any] = shape.get("rope_parameters") or shape.get("rope_scaling") or {}
    kinds: list[object] = [*ropes.values()]  # one for each kind of layer, or settings of the only one
    for rope in [cast("dict[str, Any]", each) for each in kinds if isinstance(each, dict)] or [ropes]:
        if rope.get("rope_type", rope.get("type")) in _GROWING_ROPES:
            of = {**shape, **rope}
            limit = of.get("original_max_position_embeddings") or of.get("max_position_embeddings")
            if limit is not None and config.max_model_len > limit:
                raise ConfigError(
                    f"{capabilities.adapter}: `max_model_len` is {config.max_model_len}, and beyond {limit} tokens the model's rotary "
                    "frequencies follow the longest sequence: log-probs would not be a trainer's (vLLM takes the long ones for "
                    f"short sequences, too); set it to {limit} at most"
                )


def _shape(config: RolloutConfig) -> dict[str, Any]:
    """Return what config.json says of the language model; nothing where there is none: not made yet, or refused elsewhere.

    Raises:
        ConfigError: it is no such file.
    """
    found = read_json(Path(config.model_path) / "config.json")
    return found.get("text_config", found)


def _check_recording(config: RolloutConfig, capabilities: RolloutCapabilities) -> None:
    who = capabilities.adapter
    if RolloutFeature.ROUTED_EXPERTS not in capabilities.features:
        why = capabilities.missing.get(RolloutFeature.ROUTED_EXPERTS, "it does not say them")
        raise ConfigError(f"{who}: `record_experts`: routed experts cannot be recorded here: {why}; use hf")
    shape = _shape(config)
    if shape and not any("expert" in key for key in shape):
        raise ConfigError(
            f"{who}: `record_experts`: the model in {config.model_path!r} has no experts; leave the setting out"
        )


def _check_lora(config: RolloutConfig, capabilities: RolloutCapabilities) -> None:
    who, rank = capabilities.adapter, config.lora.rank
    if rank < 0 or config.lora.alpha <= 0:
        raise ConfigError(
            f"{who}: `lora.rank` must be >= 0 and `lora.alpha` > 0, got {rank} and {config.lora.alpha}"
        )
    if rank and RolloutFeature.LORA not in capabilities.features:
        why = capabilities.missing.get(RolloutFeature.LORA, "it holds whole weights")
        raise ConfigError(f"{who}: `lora.rank` is {rank}; low-rank matrices cannot be served here: {why}")


def _check_tokenizer(config: RolloutConfig, capabilities: RolloutCapabilities) -> None:
    if not config.stop_strings:
        return
    who, folder = capabilities.adapter, Path(config.model_path)
    if RolloutFeature.STOP_STRINGS not in capabilities.features:
        why = capabilities.missing.get(RolloutFeature.STOP_STRINGS, "it reads no tokenizer")
        raise ConfigError(f"{who}: `stop_strings`: completions cannot end at a text here: {why}")
    # A folder without a config.json is refused elsewhere, or not made yet; `start` looks again.
    if (folder / "config.json").is_file() and not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"{who}: `stop_strings`: {config.model_path!r} holds no tokenizer.json, so tokens have no text; save the "
            "model's tokenizer there, or end completions at `stop_token_ids`"
        )


def check_request(
    request: GenerateRequest, config: RolloutConfig, vocab_size: int, in_use: Container[str] = ()
) -> None:
    """Refuse a request that an engine with the settings `config` can never serve, or not while the ids `in_use` run.

    Raises:
        RequestError: naming the request and what does not fit.
    """
    who = f"request {request.request_id!r}"
    prompt, max_model_len = request.prompt_ids, config.max_model_len
    if not prompt:
        raise RequestError(f"{who}: the prompt is empty; give at least one token")
    if len(prompt) >= max_model_len:
        raise RequestError(
            f"{who}: the prompt has {len(prompt)} tokens and the context {max_model_len}; "
            "shorten the prompt or raise `max_model_len` (at least one token must fit behind the prompt)"
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        bad = next(token for token in prompt if not 0 <= token < vocab_size)
        raise RequestError(f"{who}: prompt token {bad} is outside the vocabulary of {vocab_size}")
    _check_sampling(who, request.sampling, vocab_size)
    _check_stop(who, request.sampling.stop, config)
    if request.request_id in in_use:
        raise RequestError(f"request id {request.request_id!r} is in use; ids must be unique while they run")


def _check_stop(who: str, stop: tuple[str, ...], config: RolloutConfig) -> None:
    if not stop:
        return
    if not config.stop_strings:
        raise RequestError(
            f"{who}: `stop` is {stop!r}, and this engine reads no tokenizer; start it with `stop_strings`"
        )
    if isinstance(stop, str) or "" in stop:
        raise RequestError(f"{who}: `stop` must be a tuple of strings that are not empty, got {stop!r}")


def _check_sampling(who: str, sampling: SamplingParams, vocab_size: int) -> None:
    strange = [token for token in sampling.stop_token_ids if not 0 <= token < vocab_size]
    if strange:
        raise RequestError(
            f"{who}: stop token {strange[0]} is outside the vocabulary of {vocab_size} and could never come; "
            "give tokens of the model in `stop_token_ids`"
        )
    if sampling.max_tokens < 1:
        raise RequestError(f"{who}: `max_tokens` must be >= 1, got {sampling.max_tokens}")
    if not (sampling.temperature == 0 or _LEAST_TEMPERATURE <= sampling.temperature < math.inf):
        raise RequestError(
            f"{who}: `temperature` must be 0 or >= {_LEAST_TEMPERATURE} and finite, got {sampling.temperature}"
        )
    if not isinstance(cast("object", sampling.seed), int | None):  # NumPy's, say
        raise RequestError(f"{who}: `seed` must be an int or None, got {sampling.seed!r}")
    if not 0 < sampling.top_p <= 1:
        raise RequestError(f"{who}: `top_p` must be in (0, 1], got {sampling.top_p}")
    if not 0 <= sampling.top_logprobs <= vocab_size:
        raise RequestError(f"{who}: `top_logprobs` must be in [0, {vocab_size}], got {sampling.top_logprobs}")
    if sampling.top_k != -1 and sampling.top_k < 1:
        raise RequestError(f"{who}: `top_k` must be >= 1, or -1 for off, got {sampling.top_k}")


def eos_token_ids(model_path: str) -> tuple[int, ...]:
    """Return the end-of-sequence tokens a model folder names (generation_config.json, else config.json).

    Every completion ends at one of these as well as at its own `stop_token_ids`, whatever the adapter.

    Raises:
        ConfigError: the folder holds no config.json, or one of the two is damaged.
    """
    folder = Path(model_path)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{model_path!r} holds no config.json; `model_path` must be a local Hugging Face folder"
        )
    for name in ("generation_config.json", "config.json"):
        found = read_json(folder / name).get("eos_token_id")
        if found is not None:
            return tuple(cast("list[int]", found)) if isinstance(found, list) else (int(found),)
    return ()
