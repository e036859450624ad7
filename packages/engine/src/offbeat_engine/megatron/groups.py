"""The process groups of one layout. megatron-core keeps them in a module's globals; an engine lends it its own while it works.

So several engines, of other layouts, live in one process: an actor, its critic and its reference.
"""

# megatron-core is untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import math
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from offbeat_engine.megatron.blocks import Among

if TYPE_CHECKING:
    from collections.abc import Generator
    from contextlib import AbstractContextManager

    from offbeat_engine.megatron.config import MegatronConfig
    from offbeat_engine.world import World

_kept: dict[tuple[Any, ...], dict[str, Any]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """A rank's place in its layout, and the globals that say it to megatron-core.

    `tensor`, `context` and `expert` are this rank's places among those that share a matrix, sequences, and the experts; `stage` of the `num_stages`
    of the pipeline is its own. `speaks_for_copies`: of the ranks that hold the same dense weights it is the first;
    `speaks_for_experts`: of those that hold the same experts.
    """

    tensor: Among
    context: Among
    expert: Among
    stage: int
    num_stages: int
    data_rank: int
    speaks_for_experts: bool
    on_cpu: bool
    state: dict[str, Any]

    @contextmanager
    def lent(self) -> Generator[None]:
        """Give megatron-core these groups, and on a CPU CUDA's names; take both back after."""
        from megatron.core import parallel_state

        before = _globals()
        parallel_state.__dict__.update(self.state)
        try:
            with _stand_in(self.on_cpu):
                yield
        finally:
            self.state.update(_globals())
            parallel_state.__dict__.update(before)

    @property
    def speaks_for_copies(self) -> bool:
        """Whether this rank's dense weights are those that leave."""
        return self.data_rank == 0


def make_groups(config: MegatronConfig, world: World) -> Groups:
    """Return the groups of `config`, made once for engines of the same layout and deadline; a collective where they are new."""
    from megatron.core import parallel_state

    world.ensure_group(config.collective_timeout_s)
    default = dist.group.WORLD
    layout = (
        config.tensor_parallel_size,
        config.pipeline_parallel_size,
        config.virtual_pipeline_size,
        config.context_parallel_size,
        config.expert_parallel_size,
    )
    key = (default, config.collective_timeout_s, *layout)
    on_cpu = config.device == "cpu"
    for old in [kept for kept in _kept if kept[0] is not default]:
        del _kept[old]  # of a process group that was left
    if key not in _kept:
        before = _globals()
        if not _PRISTINE:
            _PRISTINE.update(before)
        parallel_state.__dict__.update(_PRISTINE)
        try:
            with _stand_in(on_cpu):
                _initialize(config)
            _kept[key] = _globals()
        finally:
            parallel_state.__dict__.update(before)
    return _placed(dict(_kept[key]), on_cpu)


_PRISTINE: dict[str, Any] = {}  # as megatron-core is imported


def _initialize(config: MegatronConfig) -> None:
    from megatron.core import parallel_state

    virtual = config.virtual_pipeline_size
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_parallel_size,
        pipeline_model_parallel_size=config.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_parallel_size,
        distributed_timeout_minutes=max(1, math.ceil(config.collective_timeout_s / 60)),
        create_gloo_process_groups=False,
    )
    if config.device == "cuda":
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(config.model.seed)


def _globals() -> dict[str, Any]:
    from megatron.core import parallel_state

    return {name: value for name, value in vars(parallel_state).items() if name[:1] == "_" and name.isupper()}


def _placed(state: dict[str, Any], on_cpu: bool) -> Groups:
    def place(name: str) -> Among:
        return Among(dist.get_rank(state[name]), dist.get_world_size(state[name]))

    pipeline = place("_PIPELINE_MODEL_PARALLEL_GROUP")
    return Groups(
        tensor=place("_TENSOR_MODEL_PARALLEL_GROUP"),
        context=place("_CONTEXT_PARALLEL_GROUP"),
        expert=place("_EXPERT_MODEL_PARALLEL_GROUP"),
        stage=pipeline.rank,
        num_stages=pipeline.size,
        data_rank=place("_DATA_PARALLEL_GROUP_WITH_CP").rank,
        speaks_for_experts=place("_EXPERT_DATA_PARALLEL_GROUP").rank == 0,
        on_cpu=on_cpu,
        state=state,
    )


def _stand_in(on_cpu: bool) -> AbstractContextManager[None]:
    if not on_cpu:
        return nullcontext()
    from offbeat_engine.megatron import cpu_shim

    return cpu_shim.on_cpu()
