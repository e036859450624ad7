"""Which experts each token went to, listened to in vLLM's workers on a CPU: its own recording needs a runner that takes a GPU.

vLLM's routers hand what they chose to a function (`BaseRouter.set_capture_fn`, 0.32). A worker that `Recording` extends has one, and
knows of each step whose tokens lie where in it. Prompts are computed whole on a CPU, and no prefix comes from a cache, so a request's
tokens come in order; one that is computed again (preempted, or at an update) keeps what its tokens were sampled by.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportMissingTypeStubs=false
# vLLM types its interfaces in part.

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from offbeat_rollout.errors import EngineStateError

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch
    from vllm.v1.engine.async_llm import AsyncLLM

    from offbeat_rollout.types import Completion, GenerateRequest

# N = tokens fed, L = layers with experts, K = experts of a token.

KEY = "offbeat_experts"
"""The name in a request's `extra_args` under which its experts are kept until they are taken."""
_KEPT = 4096  # requests that ended and were never asked about: cancelled ones


@dataclass(slots=True)
class _Heard:
    num_tokens: int = 0
    parts: list[npt.NDArray[np.int16]] = field(default_factory=list["npt.NDArray[np.int16]"])

    def add(self, first: int, experts_NLK: npt.NDArray[np.int16]) -> None:
        fresh = experts_NLK[max(0, self.num_tokens - first) :]
        if len(fresh):
            self.parts.append(fresh.copy())
            self.num_tokens += len(fresh)


class _Listener:
    """Listens to one worker's model."""

    def __init__(self, runner: Any) -> None:  # noqa: ANN401 vLLM's model runner, of the first kind
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        self._runner = runner
        self._chosen: dict[int, torch.Tensor] = {}
        self._heard: dict[str, _Heard] = {}
        mixtures = [module for module in runner.model.modules() if isinstance(module, MoERunner)]
        for mixture in mixtures:
            mixture.router.set_capture_fn(partial(self._chosen.__setitem__, mixture.layer_id))
        runner.model.register_forward_hook(self._stepped)
        self.num_layers = len(mixtures)

    def _stepped(self, *_: object) -> None:
        runner, chosen = self._runner, dict(sorted(self._chosen.items()))
        self._chosen.clear()
        names: list[str] = runner.input_batch.req_ids
        if not names:
            return  # a step without requests, which warms up
        assert len(chosen) == self.num_layers, "a layer's router was not asked"
        experts_NLK = np.stack([one.numpy().astype(np.int16) for one in chosen.values()], 1)
        starts, positions = runner.query_start_loc.np, runner.positions
        for place, name in enumerate(names):
            begin, end = int(starts[place]), int(starts[place + 1])
            asked = (runner.requests[name].sampling_params.extra_args or {}).get(KEY)
            if asked is not None and end > begin:
                self._heard.setdefault(asked, _Heard()).add(int(positions[begin]), experts_NLK[begin:end])

    def take(self, key: str) -> npt.NDArray[np.int16] | None:
        """Return the experts [N, L, K] of a request that has ended, and forget them; None if nothing was computed."""
        heard = self._heard.pop(key, None)
        while len(self._heard) > _KEPT + len(self._runner.requests):
            self._heard.pop(next(iter(self._heard)))
        return None if heard is None else np.concatenate(heard.parts)


class Recording:
    """Extends vLLM's workers (`worker_extension_cls`); its methods are called by `collective_rpc`."""

    model_runner: Any

    def record_experts(self) -> int:
        """Begin to listen; return how many layers have experts."""
        self.expert_listener = _Listener(self.model_runner)
        return self.expert_listener.num_layers

    def taken_experts(self, key: str) -> tuple[bytes, tuple[int, ...]] | None:
        """Return the experts of the request with `key`, as bytes of int16 and their shape."""
        found = self.expert_listener.take(key)
        return None if found is None else (found.tobytes(), found.shape)


async def begin(llm: AsyncLLM, timeout_s: float) -> None:
    """Let the workers of `llm` listen.

    Raises:
        EngineStateError: they find nothing to listen to.
    """
    if 0 in await llm.collective_rpc("record_experts", timeout_s):
        raise EngineStateError(
            "vLLM has no routers to listen to in this model; start it without `record_experts`"
        )


async def recorded(
    llm: AsyncLLM, key: str, request: GenerateRequest, done: Completion, timeout_s: float
) -> Completion:
    """Return `done` with the experts that were kept of it under `key`; all ranks of a replica have the same.

    Raises:
        EngineStateError: they are not those of its tokens.
    """
    told = (await llm.collective_rpc("taken_experts", timeout_s, (key,)))[0]
    if not done.num_tokens:
        return done
    fed = len(request.prompt_ids) + done.num_tokens - 1
    experts = (
        np.zeros((0, 0, 0), np.int16) if told is None else np.frombuffer(told[0], np.int16).reshape(told[1])
    )
    if len(experts) < fed:
        raise EngineStateError(
            f"vLLM routed {len(experts)} tokens of request {request.request_id!r}, and {fed} were fed"
        )
    return replace(done, routed_experts=experts[:fed].copy())  # a step ahead may have been computed
