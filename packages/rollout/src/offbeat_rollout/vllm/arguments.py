"""The arguments vLLM is started with: ours, and those that pass through.

`engine_args` may hold whatever vLLM's `AsyncEngineArgs` has but `OURS`: what is set here follows from a setting of this package,
or updates and log-probs rest on it.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportMissingTypeStubs=false
# vLLM types its interfaces in part.

from __future__ import annotations

import ast
import difflib
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat_rollout.errors import ConfigError
from offbeat_rollout.vllm.recording import Recording
from offbeat_rollout.vllm.updates import lora_args

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from offbeat_rollout.vllm.config import VllmConfig

GIB = 2**30
_CPU_STEP_TOKENS = 8192  # a batch of short prompts in one step

_DEVICES = "a replica has the devices of `tensor_parallel_size`, and there may be more replicas"
_UPDATES = "weight updates rest on it"
_LORA = "`lora` decides it"

OURS: dict[str, str] = {
    "model": "set `model_path`",
    "trust_remote_code": "set `trust_remote_code` of the model",
    "dtype": "set `dtype`",
    "max_model_len": "set `max_model_len`",
    "max_num_seqs": "set `max_num_seqs`",
    "tensor_parallel_size": "set `tensor_parallel_size`",
    "pipeline_parallel_size": _DEVICES,
    "data_parallel_size": _DEVICES,
    "nnodes": _DEVICES,
    "distributed_executor_backend": _DEVICES,
    "enforce_eager": "set `enforce_eager`",
    "enable_prefix_caching": "set `prefix_caching`",
    "gpu_memory_utilization": "set `gpu_memory_fraction`",
    "weight_transfer_config": "set `weight_backend`",
    "enable_lora": _LORA,
    "max_loras": _LORA,
    "max_cpu_loras": _LORA,
    "max_lora_rank": _LORA,
    "additional_config": _UPDATES,
    "enable_sleep_mode": "it follows from `device`",
    "skip_tokenizer_init": "set `stop_strings`",
    "enable_return_routed_experts": "set `record_experts`",
    "logprobs_mode": "log-probs are those of the distribution that was drawn from",
    "max_logprobs": "a request says how many it wants",
    "generation_config": "sampling is what the request says",
}
"""Arguments that are not taken in `engine_args`, each with what to do or why."""

OURS_ON_CPU = {
    "kv_cache_memory_bytes": "set `kv_cache_gib`",
    "enable_chunked_prefill": "vLLM on CPU dies of a seeded prompt in two steps",
    "max_num_batched_tokens": "prompts are computed whole on CPU",
}


OURS_RECORDING = {"worker_extension_cls": "`record_experts` has one"}


def check_arguments(config: VllmConfig) -> None:
    """Refuse what vLLM would not take, or not be itself with; vLLM is not imported.

    Raises:
        ConfigError: naming every wrong one.
    """
    cpu = config.device == "cpu"
    if cpu and config.enforce_eager is False:
        raise ConfigError("vllm: `enforce_eager` is false, and a CPU has no CUDA graphs; leave it out")
    _check_recording(config)
    ours = {**OURS, **(OURS_ON_CPU if cpu else {}), **(OURS_RECORDING if config.record_experts else {})}
    problems = [f"`{name}` is not taken there: {ours[name]}" for name in config.engine_args if name in ours]
    known = argument_names() - ours.keys()
    for name in config.engine_args.keys() - ours.keys() - known:
        if known:  # without vLLM here, its own process will say so
            near = difflib.get_close_matches(name, known, n=1)
            problems.append(f"vLLM has no `{name}`" + (f"; did you mean `{near[0]}`?" if near else ""))
    if problems:
        raise ConfigError(f"vllm: `engine_args`: {'; '.join(sorted(problems))}")


def _check_recording(config: VllmConfig) -> None:
    if not config.record_experts:
        return
    if config.device != "cpu":
        raise ConfigError(
            f"vllm: `record_experts` on device {config.device!r}: vLLM 0.32 records them there in its Model Runner V2, which this "
            "adapter was not tried with; use hf"
        )
    if config.prefix_caching:
        raise ConfigError(
            "vllm: `record_experts`: what `prefix_caching` finds again is routed no more; leave one of them out"
        )


def check_heads(config: VllmConfig) -> None:
    """Refuse a model that vLLM would accept on a CPU, and die of at the first request; vLLM is not imported.

    A folder without a config.json that transformers reads is refused elsewhere, or not made yet.

    Raises:
        ConfigError: vLLM has no kernel for its heads.
    """
    if config.device != "cpu" or not (Path(config.model_path) / "config.json").is_file():
        return
    from transformers import AutoConfig

    try:
        text = AutoConfig.from_pretrained(
            config.model_path, local_files_only=True, trust_remote_code=config.trust_remote_code
        ).get_text_config()
    except (OSError, ValueError):
        return
    heads = int(getattr(text, "num_attention_heads", 0) or 0)  # a family without attention has none
    head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // max(1, heads))
    supported = cpu_head_sizes()
    if heads and supported and head_dim not in supported:
        raise ConfigError(
            f"vllm on CPU has no attention for a head dimension of {head_dim} (hidden size {text.hidden_size}, "
            f"{heads} heads); it has {', '.join(map(str, supported))}"
        )


@cache
def cpu_head_sizes() -> tuple[int, ...]:
    """Return the head dimensions that the installed vLLM's attention on a CPU has, read from its source as `argument_names`."""
    for found in ast.walk(_parsed("v1/attention/backends/cpu_attn.py")):
        if isinstance(found, ast.FunctionDef) and found.name == "get_supported_head_sizes":
            (line,) = [line for line in found.body if isinstance(line, ast.Return)]
            assert line.value is not None
            return tuple(ast.literal_eval(line.value))
    return ()


def _parsed(path: str) -> ast.Module:
    """Return a file of the installed vLLM; an empty one where it is not installed."""
    spec = find_spec("vllm")
    origin = None if spec is None else spec.origin
    return ast.parse("" if origin is None else (Path(origin).parent / path).read_text())


@cache
def argument_names() -> frozenset[str]:
    """Return the fields of the installed vLLM's `AsyncEngineArgs`, read from its source; none where it is not installed.

    Importing it would take ten seconds and more, in processes that never generate.
    """
    return frozenset(
        line.target.id
        for found in _parsed("engine/arg_utils.py").body
        if isinstance(found, ast.ClassDef) and found.name in ("EngineArgs", "AsyncEngineArgs")
        for line in found.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    )


def engine_args(config: VllmConfig) -> AsyncEngineArgs:
    """Return the arguments of `AsyncLLM` for `config`, which was checked."""
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    cpu = config.device == "cpu"
    arguments: dict[str, Any] = {
        "model": config.model_path,
        "trust_remote_code": config.trust_remote_code,
        "skip_tokenizer_init": not config.stop_strings,  # token in, token out
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tensor_parallel_size,
        "distributed_executor_backend": "uni" if config.tensor_parallel_size == 1 else "mp",
        "enforce_eager": cpu if config.enforce_eager is None else config.enforce_eager,
        # Always safe, see `engine`; off on CPU because a prompt computed in two parts may differ in its last bits.
        "enable_prefix_caching": not cpu if config.prefix_caching is None else config.prefix_caching,
        "gpu_memory_utilization": config.gpu_memory_fraction,
        "enable_sleep_mode": not cpu,
        # Log-probs of the distribution that was drawn from; greedy rows are given at temperature 1 there.
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,  # a request may ask for as many as there are
        "generation_config": "vllm",  # sampling is what the request says, nothing from the model folder
        "weight_transfer_config": WeightTransferConfig(backend=config.weight_backend),
        "disable_log_stats": True,
        "enable_log_requests": False,
    }
    if cpu:
        # On CPU vLLM 0.32 dies of a seeded request whose prompt it computes in two steps (it moves the offset of a
        # generator that has none), so prompts are computed whole there.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(_CPU_STEP_TOKENS, config.max_model_len, config.max_num_seqs)
        arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gib * GIB)
    if config.record_experts:
        arguments["worker_extension_cls"] = f"{Recording.__module__}.{Recording.__qualname__}"
    return AsyncEngineArgs(**{**arguments, **lora_args(config.lora), **config.engine_args})
