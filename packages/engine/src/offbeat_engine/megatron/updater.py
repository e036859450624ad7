"""From accumulated gradients to new weights: megatron-core's wrapper and optimizers, one call at a time."""

# megatron-core is untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from offbeat_engine.errors import StateError
from offbeat_engine.megatron.config import OF_COPIES, passed
from offbeat_engine.megatron.layers.model import Chunk
from offbeat_engine.toolkit.collectives import compute_dtype
from offbeat_engine.toolkit.step.schedules import learning_rate

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from offbeat_engine.megatron.config import MegatronConfig


def wrapped(config: MegatronConfig, models: Sequence[Any]) -> list[Chunk]:
    """Return chunks of `models`, in megatron-core's wrapper where they are trained: it keeps gradients in float32."""
    if config.inference_only:
        return [Chunk(model=model, wrapped=model) for model in models]
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=config.distributed_optimizer,
        **passed(config, OF_COPIES),
    )
    chunks = [
        Chunk(
            model=model,
            wrapped=DistributedDataParallel(
                config=model.config, ddp_config=settings, module=model, disable_bucketing=number > 0
            ),
        )
        for number, model in enumerate(models)
    ]
    if settings.overlap_grad_reduce:  # gradients leave in the last micro-batch's backward pass alone
        waiting = [chunk.wrapped.no_sync for chunk in chunks]
        models[0].config.no_sync_func = waiting if len(waiting) > 1 else waiting[0]
    return chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """This rank's run of a flattened parameter, `start` to `stop`, whose moments it keeps in `state` (empty before the first step).

    `master` has its numbers in float32, in the shape of a moment; `is_apart` where they are not the parameter's own memory.
    `shared_out`: copies of the model keep other runs; else each keeps all.
    """

    start: int
    stop: int
    master: torch.Tensor
    state: dict[str, Any]
    is_apart: bool
    shared_out: bool


class Updater:
    """Optimizer and schedule over this rank's chunks. Gradients are brought together over ranks once, before the step."""

    def __init__(self, config: MegatronConfig, chunks: Sequence[Chunk]) -> None:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        chosen = config.optimizer
        self._config = chosen
        self._chunks = [chunk.wrapped for chunk in chunks]
        self._together = False
        # Gradients leave during backward; None: they do not.
        self._under_way = False if config.megatron_args.get("overlap_grad_reduce") else None
        self._shares_out = config.distributed_optimizer
        self.num_steps = 0
        settings = OptimizerConfig(
            optimizer="adam",
            lr=chosen.lr,
            weight_decay=chosen.weight_decay,
            adam_beta1=chosen.beta1,
            adam_beta2=chosen.beta2,
            adam_eps=chosen.eps,
            decoupled_weight_decay=True,
            clip_grad=0.0,
            bf16=compute_dtype(config) is torch.bfloat16,
            params_dtype=compute_dtype(config),
            use_distributed_optimizer=config.distributed_optimizer,
        )
        # No overrides: weight decay is for every weight, as in the other engines, and not for matrices alone.
        with _torchs_adam():
            self._optimizer: Any = get_megatron_optimizer(
                settings, self._chunks, config_overrides={}, use_gloo_process_groups=False
            )
        self._places = self._found_places()

    @property
    def rule_name(self) -> str:
        """Which rule's moments these are."""
        return str(self._config.name)

    def share(self, param: torch.nn.Parameter) -> Share | None:
        """Return what this rank keeps of `param`; None where that is nothing."""
        place = self._places.get(param)
        if place is None:
            return None
        optimizer, master, start, stop = place
        return Share(
            start=start,
            stop=stop,
            master=master,
            state=optimizer.state[master],
            is_apart=master.dtype is not param.dtype,
            shared_out=self._shares_out,
        )

    def _found_places(self) -> dict[torch.nn.Parameter, tuple[Any, torch.Tensor, int, int]]:
        """Return for each parameter of which this rank keeps moments: torch's optimizer, its parameter there, and the run."""
        places: dict[torch.nn.Parameter, tuple[Any, torch.Tensor, int, int]] = {}
        for outer in self._optimizer.chained_optimizers:
            inner = outer.optimizer
            if inner is None:
                continue
            if not self._shares_out:
                places |= {param: (inner, master, 0, param.numel()) for param, master in _masters(outer)}
                continue
            for param, (group, order) in outer.model_param_group_index_map.items():
                run = outer._get_model_param_range_map(param)["param"]  # noqa: SLF001 it has no public name
                places[param] = (inner, inner.param_groups[group]["params"][order], run.start, run.end)
        return places

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._together = False
        self._under_way = None if self._under_way is None else False

    def begin_call(self) -> None:
        """Raise `StateError` where gradients were brought together already: more would be counted several times."""
        if self._together:
            raise StateError(
                "gradients were brought together over the ranks (by `named_gradients` or `optimizer_step`); "
                "call `optimizer_zero_grad` before the next training call"
            )
        if self._under_way:
            raise StateError(
                "with `megatron_args.overlap_grad_reduce` gradients leave the ranks during a training call: one belongs to each step; "
                "call `optimizer_zero_grad` before the next one, or leave the setting out"
            )
        self._under_way = None if self._under_way is None else True

    def bring_together(self, everywhere: bool = False) -> None:
        """Add gradients up over copies, and over ranks that hold parts of one; once. `everywhere`: not for the owner alone."""
        if self._together:
            return
        if everywhere and self._under_way is not None and self._shares_out:
            raise StateError(
                "with `megatron_args.overlap_grad_reduce` and `distributed_optimizer` each rank keeps the gradients that it steps with; "
                "leave one of them out to see all"
            )
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads(self._chunks, force_all_reduce=everywhere)
        self._together = True

    def grad_norm(self) -> float:
        """Return the L2 norm of the gradient over all parameters and ranks, the same on all ranks."""
        self.bring_together()
        self._optimizer.prepare_grads()
        return float(self._optimizer.get_grad_norm())

    def step(self, grad_norm: float, lr: float, betas: tuple[float, float]) -> None:
        """Scale gradients of norm `grad_norm` to at most `max_grad_norm`, then take one step."""
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

        limit = self._config.max_grad_norm
        for optimizer in self._optimizer.chained_optimizers:
            params = optimizer.get_parameters()
            if 0 < limit < grad_norm and params:
                clip_grad_by_total_norm_fp32(params, limit, grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"], group["betas"] = lr, betas
        self._optimizer.step_with_ready_grads()

    def set_num_steps(self, num_steps: int) -> float:
        """Jump to the learning rate of optimizer step `num_steps` and return it."""
        self.num_steps = num_steps
        return learning_rate(self._config, num_steps)


@contextmanager
def _torchs_adam() -> Generator[None]:
    """Let megatron-core step by torch's AdamW inside, also where it finds Transformer Engine's, which counts its steps elsewhere.

    So there is one state to checkpoint, wherever a run goes on.
    """
    from megatron.core import optimizer

    kept, optimizer.USING_PYTORCH_OPTIMIZER = optimizer.USING_PYTORCH_OPTIMIZER, True
    try:
        yield
    finally:
        optimizer.USING_PYTORCH_OPTIMIZER = kept


def _masters(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:  # noqa: ANN401
    """Yield the parameters of one of megatron-core's optimizers, and what it steps in their place."""
    if not hasattr(optimizer, "float16_groups"):
        for group in optimizer.optimizer.param_groups:
            yield from ((param, param) for param in group["params"])
        return
    for params, masters in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
        yield from zip(params, masters, strict=True)


def gradient(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Return what has been accumulated for `param`, float32; None where it is not trained."""
    return getattr(param, "main_grad", None) if param.requires_grad else None
