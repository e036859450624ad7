"""Which kernels compute: compiled layers, deterministic algorithms."""

# transformers' modules are untyped here, and torch's compiler keeps its settings in a private module.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import shutil
import sysconfig
import warnings
from contextlib import ExitStack, contextmanager
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from offbeat_engine.fsdp2.attention.packed import OpaquePlan
from offbeat_engine.fsdp2.families import layers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from offbeat_engine.fsdp2.config import Fsdp2Config
    from offbeat_engine.fsdp2.model.scorer import Scorer

# What torch's compiler says about itself as it compiles.
_REMARKS = ("`torch.jit", "The .grad attribute of a Tensor that is not a leaf")


def compile_layers(scorer: Scorer) -> None:
    """Compile each decoder layer's forward for any number of tokens; layers of one kind share the code.

    Only forward is replaced, so what hooks into modules (sharding, checkpointing) stays outside and names stay as
    they are. Packed attention is no part of the graph, for its plan differs with every micro-batch, nor are experts
    that are held as one tensor, for how many tokens each gets is known only as it runs.
    """
    with _quiet():
        for layer in layers_of(scorer.hf):
            for module in layer.modules():
                if any(param.dim() > 2 for param in module.parameters(recurse=False)):
                    module.forward = torch.compiler.disable(module.forward)
            layer.forward = _with_opaque_plan(torch.compile(layer.forward, dynamic=True))


def _with_opaque_plan(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def call(*args: Any, **options: Any) -> Any:
        plan = options.get("packed")
        return forward(*args, **options if plan is None else {**options, "packed": OpaquePlan(plan)})

    return call


@contextmanager
def kernels(config: Fsdp2Config) -> Generator[None]:
    """Compute as `config` says inside, and leave torch's settings as they were."""
    with ExitStack() as stack:
        if config.compile:  # compiling happens at the first call of each kind, backward too
            stack.enter_context(_quiet())
        if config.deterministic:
            stack.enter_context(_deterministic())
        yield


def compiler_missing(device: str) -> str | None:
    """Return why torch.compile could not make kernels for `device` here, or None if it can."""
    if device == "cuda":
        return None if find_spec("triton") else "compiling for CUDA needs the triton package"
    from torch._inductor import config as inductor

    names = [str(name) for name in inductor.cpp.cxx if name]
    if not any(map(shutil.which, names)):
        return f"compiling for a CPU needs a C++ compiler, and there is no {' or '.join(names)}"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "compiling for a CPU needs Python's C headers (Python.h)"
    home = str(Path(torch.__file__).parent)
    if any(map(str.isspace, home)):
        return f"compiling for a CPU links with what lies in {home!r}, and torch leaves the space unquoted"
    return None


@contextmanager
def _deterministic() -> Generator[None]:
    wanted = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(wanted, warn_only=warned_only)


@contextmanager
def _quiet() -> Generator[None]:
    with warnings.catch_warnings():
        for start in _REMARKS:
            warnings.filterwarnings("ignore", message=start)
        yield
