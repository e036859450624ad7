"""The process groups of one layout. megatron-core keeps them in a module's globals; an engine lends it its own while it works.

So several engines, of other layouts, live in one process: an actor, its critic and its reference.

What megatron-core takes from CUDA, for an engine on a CPU: for tests on gloo. Nothing imports this where an engine runs on a GPU.

Its own modules are mended for good; what belongs to torch is lent, inside `on_cpu` only.
"""

# megatron-core is untyped, and torch's own functions are replaced by others of their names.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false, reportPrivateUsage=false, reportUnknownLambdaType=false

from __future__ import annotations

import math
import mmap
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from offbeat_engine.megatron.families import Among

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager

    from offbeat_engine.megatron.config import MegatronConfig
    from offbeat_engine.toolkit.world import World


_CPU = torch.device("cpu")
_TYPES = {"torch.FloatTensor": "torch.cuda.FloatTensor", "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor"}
_depth = 0
_mended = False


class _Nothing:
    """A stream or an event: whatever is asked of it is done already."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, _: str) -> Callable[..., _Nothing]:
        return lambda *_, **__: self


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
        if kwargs.get("device") == "cuda":
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return made


def _zeros(*args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
    """Return zeros; a buffer's take no memory before somebody writes, as those of gradients do until the first step."""
    dtype = kwargs.get("dtype")
    size = args[0] if len(args) == 1 else None
    if kwargs.get("device") != _CPU or dtype is None or not isinstance(size, int) or not size:
        return _ZEROS(*args, **kwargs)
    pages = mmap.mmap(-1, size * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype)


def _type_of(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    answer = _TENSOR_TYPE(tensor, *args, **kwargs)
    return _TYPES.get(answer, answer) if not args and not kwargs else answer


def _all_to_all(output: torch.Tensor, given: torch.Tensor, *sizes: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Gloo takes sizes as integers, and megatron-core hands over what numpy made of them."""
    named = {
        key: [int(size) for size in value] if key.endswith("sizes") and value is not None else value
        for key, value in kwargs.items()
    }
    return _ALL_TO_ALL(output, given, *sizes, **named)


_ZEROS = _on_cpu(torch.zeros)
_TENSOR_TYPE = torch.Tensor.type
_ALL_TO_ALL = dist.all_to_all_single
_LENT: tuple[tuple[Any, str, Any], ...] = (
    (torch.cuda, "current_device", lambda: _CPU),
    (torch.cuda, "synchronize", lambda *_: None),
    (torch.cuda, "Stream", _Nothing),
    (torch.cuda, "Event", _Nothing),
    (torch.cuda, "current_stream", lambda *_: _Nothing()),
    (torch.cuda, "stream", lambda *_: nullcontext()),
    (torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
    (torch.Tensor, "record_stream", lambda *_: None),
    (torch.Tensor, "type", _type_of),
    (torch, "zeros", _zeros),
    (torch, "tensor", _on_cpu(torch.tensor)),
    (dist, "all_to_all_single", _all_to_all),
)


@contextmanager
def on_cpu() -> Generator[None]:
    """Lend torch what megatron-core asks of CUDA; may be entered again inside."""
    global _depth
    _mend()
    if _depth == 0:
        _kept_values.extend(getattr(owner, name) for owner, name, _ in _LENT)
        for owner, name, stand_in in _LENT:
            setattr(owner, name, stand_in)
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if _depth == 0:
            for (owner, name, _), was in zip(_LENT, _kept_values, strict=True):
                setattr(owner, name, was)
            _kept_values.clear()


_kept_values: list[Any] = []


def _mend() -> None:
    """Mend megatron-core itself: random states are of CUDA alone."""
    global _mended
    if _mended:
        return
    from megatron.core.tensor_parallel import random

    tracker: Any = random.CudaRNGStatesTracker
    tracker.fork = lambda *_, **__: nullcontext()
    random._get_all_rng_states = lambda: (torch.get_rng_state(), None, None)  # noqa: SLF001
    random._set_all_rng_states = lambda cpu, *_: torch.set_rng_state(cpu)  # noqa: SLF001
    _mended = True


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


def _stand_in(is_cpu: bool) -> AbstractContextManager[None]:
    return on_cpu() if is_cpu else nullcontext()
