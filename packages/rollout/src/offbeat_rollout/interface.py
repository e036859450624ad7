"""The generation interface. Adapters translate it to vLLM, SGLang or Transformers and add nothing."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from offbeat_rollout.checks import check_config
from offbeat_rollout.config import RolloutConfig, require_config

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path
    from typing import TypeAlias

    import torch

    from offbeat_rollout.types import (
        Completion,
        GenerateRequest,
        Health,
        PauseMode,
        RolloutCapabilities,
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
            RequestTimeout: the engine worked on it for `request_timeout_s` (queueing and pauses do not count).
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
