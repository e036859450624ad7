"""Build the Hugging Face model and put a head on it."""

# transformers is typed in part, and torch's compiler keeps its settings in a private module.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

import shutil
import sysconfig
import warnings
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from offbeat_engine.errors import ConfigError
from offbeat_engine.fsdp2 import families
from offbeat_engine.fsdp2.attention import packed as attention
from offbeat_engine.fsdp2.attention import varlen
from offbeat_engine.fsdp2.attention.packed import OpaquePlan
from offbeat_engine.fsdp2.families import layers_of
from offbeat_engine.fsdp2.model import trainable
from offbeat_engine.fsdp2.model.trainable import Scorer
from offbeat_engine.fsdp2.weights import export, loading, lora
from offbeat_engine.toolkit.collectives import compute_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from offbeat_engine.fsdp2.config import Fsdp2Config


# Operators of matrix products and of fused attention, by namespace: most of a layer's work, little of its memory.
_COSTLY = {
    "aten": (
        "mm", "addmm", "bmm", "baddbmm", "_grouped_mm",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    ),
    "torch_attn": ("_varlen_attn",),
}  # fmt: skip


def compute_again(hf: Any, config: Fsdp2Config) -> None:
    """Let every layer of `hf` keep its input alone, or its costly results besides."""
    settings: dict[str, Any] = {"use_reentrant": False}
    if config.checkpoint_keeps == "products":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    hf.gradient_checkpointing_enable(settings)


def _policy(_ctx: object, operator: Any, *_args: object, **_settings: object) -> CheckpointPolicy:
    name = operator._schema.name.partition("::")[2]  # noqa: SLF001 it has no public name
    keeps = name in _COSTLY.get(operator.namespace, ())
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


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


def build_scorer(config: Fsdp2Config) -> Scorer:
    """Build the model, ready to be sharded: with its weights on the CPU in float32, or with none yet (`on_meta`).

    Raises:
        ConfigError: the folder holds no such model, or the family does not fit the config.
    """
    attention.register()
    name = varlen.implementation(config)
    hf, on_meta = loading.load(config.model, "sdpa" if name == attention.NAME else name)
    refused = "; ".join(map(str, families.refusals(hf, config)))
    if refused:
        raise ConfigError(refused)
    if name == attention.NAME:
        hf.set_attn_implementation(name)
    export.check(hf, {name: tuple(tensor.shape) for name, tensor in export.named_tensors(hf).items()})
    trainable.freeze(hf, config.freeze)
    if config.activation_checkpointing:
        compute_again(hf, config)
    if config.inference_only:
        hf.requires_grad_(False)
        _cast(hf, dict(hf.named_parameters()), compute_dtype(config))
    base = _add_adapters(hf, config, on_meta) if config.lora.rank else {}
    scorer = Scorer(hf, config.model.head, base, on_meta)
    if config.compile:
        compile_layers(scorer)
    return scorer


def _add_adapters(hf: Any, config: Fsdp2Config, on_meta: loading.OnMeta | None) -> dict[str, int]:
    """Put adapters into `hf`; return the fingerprints of the base, which checkpoints do not hold (0: not yet read)."""
    trainable.attach(hf, config)
    frozen = {name: param for name, param in hf.named_parameters() if not param.requires_grad}
    base = {name: 0 if param.is_meta else lora.fingerprint(param) for name, param in frozen.items()}
    if on_meta is not None:
        on_meta.initialised.update(
            (name, param.detach().clone()) for name, param in hf.named_parameters() if lora.is_adapter(name)
        )
    _cast(hf, frozen, compute_dtype(config))  # never stepped, so float32 would only be memory
    return base


def _cast(hf: Any, params: dict[str, torch.nn.Parameter], dtype: torch.dtype) -> None:
    for name, param in params.items():
        if not families.stays_float32(hf, lora.plain_name(name)):
            param.data = param.data.to(dtype)
