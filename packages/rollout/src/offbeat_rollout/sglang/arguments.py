"""How the server is started: the environment it runs in, and its arguments, ours and those that pass through.

`server_args` may hold whatever SGLang's `ServerArgs` has but `OURS`: what is set here follows from a setting of this package, or
updates and log-probs rest on it. SGLang is not imported, here or anywhere else in this process.
"""

from __future__ import annotations

import ast
import difflib
import json
import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from offbeat_rollout.errors import ConfigError
from offbeat_rollout.interface import eos_token_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat_rollout.sglang.config import SglangConfig

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2}
OLDEST = (0, 5, 23)  # nothing older was run
MARGIN = 8  # tokens of its context that SGLang keeps for itself
CPU_LAUNCHER = "sglang_cpu.py"  # in the environment's `bin`; see tools/sglang_cpu.py
_DAY_S = 86_400

_UPDATES = "weight updates rest on it"
_REPLICAS = "a replica is one server of one process group; `num_replicas` makes more of them"
_TOKENS = "token in, token out"

OURS: dict[str, str] = {
    "model_path": "set `model_path`",
    "trust_remote_code": "set `trust_remote_code` of the model",
    "tokenizer_path": _TOKENS,
    "skip_tokenizer_init": _TOKENS,
    "host": "the adapter chooses the address",
    "port": "the adapter chooses the address",
    "api_key": "the adapter makes a key for each server",
    "admin_api_key": "the adapter makes a key for each server",
    "device": "set `device`",
    "dtype": "set `dtype`",
    "context_length": "set `max_model_len`",
    "max_running_requests": "set `max_num_seqs`",
    "max_total_tokens": "set `kv_cache_gib`",
    "mem_fraction_static": "set `gpu_memory_fraction`, on a CPU `kv_cache_gib`",
    "tp_size": "set `tensor_parallel_size`",
    "pp_size": _REPLICAS,
    "dp_size": _REPLICAS,
    "nnodes": _REPLICAS,
    "ep_size": "ranks share each expert, and updates are proven so",
    "enable_deterministic_inference": "set `deterministic`",
    "rl_on_policy_target": "it would compute log-probs in another precision than the weights'",
    "incremental_streaming_output": "answers are read so",
    "sampling_defaults": "sampling is what the request says",
    "preferred_sampling_params": "sampling is what the request says",
    "sampling_mask_max_tokens": "log-probs under `top_p` rest on it",
    "weight_version": _UPDATES,
    "quantization": _UPDATES,
    "load_format": _UPDATES,
    "weight_cache_mode": _UPDATES,
    "enable_return_routed_experts": "set `record_experts`",
    "speculative_algorithm": _UPDATES,
}
"""Arguments that are not taken in `server_args`, each with what to do or why."""


def environment_of(config: SglangConfig) -> Path:
    """Return the folder of the virtual environment that SGLang runs in."""
    own = Path(sys.prefix)
    return Path(config.environment) if config.environment else own.with_name(f"{own.name}-sglang")


def check_arguments(config: SglangConfig) -> None:
    """Refuse an environment without SGLang, and arguments that it would not take, or not be itself with.

    Raises:
        ConfigError: naming every wrong one.
    """
    folder = environment_of(config)
    root = _packages(folder)
    if root is None or not (folder / "bin" / "python").exists():
        raise ConfigError(
            f"sglang: there is no SGLang in {str(folder)!r}; `tools/setup sglang` makes an environment for it beside that of "
            "this checkout, or name yours in `environment`"
        )
    found = _version(root)
    if found < OLDEST:
        raise ConfigError(
            f"sglang: {str(folder)!r} holds SGLang {'.'.join(map(str, found))}; this adapter speaks to "
            f"{'.'.join(map(str, OLDEST))} and later"
        )
    problems = [f"`{name}` is not taken there: {OURS[name]}" for name in config.server_args if name in OURS]
    known = argument_names(root) - OURS.keys()
    for name in config.server_args.keys() - OURS.keys() - known:
        near = difflib.get_close_matches(name, known, n=1)
        problems.append(f"SGLang has no `{name}`" + (f"; did you mean `{near[0]}`?" if near else ""))
    if problems:
        raise ConfigError(f"sglang: `server_args`: {'; '.join(sorted(problems))}")


def _packages(folder: Path) -> Path | None:
    """Return where the environment in `folder` keeps its packages, if SGLang is one of them."""
    return next(
        (path.parents[1] for path in folder.glob("lib/python3.*/site-packages/sglang/version.py")), None
    )


def _version(root: Path) -> tuple[int, ...]:
    names = [path.name for path in root.glob("sglang-*.dist-info")]
    numbers = re.match(r"sglang-(\d+)\.(\d+)\.(\d+)", names[0]) if names else None
    return (0,) if numbers is None else tuple(map(int, numbers.groups()))


@cache
def argument_names(root: Path) -> frozenset[str]:
    """Return the fields of `ServerArgs` of the SGLang in `root`, read from its source: importing it takes ten seconds."""
    folder = root / "sglang" / "srt" / "arg_groups" / "fields"
    return frozenset(
        line.target.id
        for path in folder.glob("*.py")
        for found in ast.parse(path.read_text()).body
        if isinstance(found, ast.ClassDef)
        for line in found.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    )


def server_command(config: SglangConfig, port: int, secrets: Path) -> list[str]:
    """Return the words that start the server of a checked `config` on `port`; `secrets` is a file of arguments that nobody may list."""
    folder = environment_of(config)
    launcher = folder / "bin" / CPU_LAUNCHER
    by_launcher = config.device == "cpu" and launcher.exists()
    # The context is `MARGIN` longer than any sequence is, which may be more than the model was made for.
    words = ["env", "HF_HUB_OFFLINE=1", "PYTHONUNBUFFERED=1", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"]
    # The client drops connections that nobody uses. A server that does so first, after 5 s by itself, may do it while a
    # request is on its way, which is lost.
    words.append(f"SGLANG_TIMEOUT_KEEP_ALIVE={_DAY_S}")
    if config.device == "cpu":
        # A kernel of the sampler would be compiled at the first request, which takes longer than all requests of a test.
        words += [f"OMP_NUM_THREADS={config.cpu_threads}", "TORCHDYNAMO_DISABLE=1"]
        if config.tensor_parallel_size > 1:
            words += _ranks_on_cores(config)
    words += [
        str(folder / "bin" / "python"),
        *([str(launcher)] if by_launcher else ["-m", "sglang.launch_server"]),
    ]
    for name, value in server_args(config, port).items():
        words += _words(name, value)
    return [*words, "--config", str(secrets)]


def _ranks_on_cores(config: SglangConfig) -> list[str]:
    """Give each rank cores of its own while they last; by itself SGLang wants a NUMA node for each. Replicas get the same ones."""
    cores, threads = sorted(os.sched_getaffinity(0)), config.cpu_threads
    ranks = [
        ",".join(str(cores[(rank * threads + one) % len(cores)]) for one in range(threads))
        for rank in range(config.tensor_parallel_size)
    ]
    # There is no GPU for the NCCL that comes with torch: not to find it is what keeps SGLang from trying.
    return [f"SGLANG_CPU_OMP_THREADS_BIND={'|'.join(ranks)}", "SGLANG_NCCL_SO_PATH=/nonexistent"]


def server_args(config: SglangConfig, port: int) -> dict[str, object]:
    """Return the arguments of `ServerArgs` for a checked `config`."""
    arguments: dict[str, object] = {
        "model_path": config.model_path,
        "trust_remote_code": config.trust_remote_code,
        "skip_tokenizer_init": True,
        "host": "127.0.0.1",
        "port": port,
        "device": config.device,
        "dtype": config.dtype,
        "context_length": config.max_model_len + MARGIN,
        "max_running_requests": config.max_num_seqs,
        "tp_size": config.tensor_parallel_size,
        "weight_version": "0",
        "sampling_defaults": "openai",  # nothing from the model folder
        "enable_deterministic_inference": config.deterministic,
        "enable_return_routed_experts": config.record_experts,
        "sampling_mask_max_tokens": int(model_settings(config.model_path)["vocab_size"]),
        "incremental_streaming_output": True,
        "stream_interval": 8,  # tokens of a request between two messages about it
        "skip_server_warmup": True,
        "log_level": "warning",
    }
    if config.device == "cpu":
        arguments |= {
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "cuda_graph_backend_decode": "disabled",
            "cuda_graph_backend_prefill": "disabled",
            "disable_overlap_schedule": True,
            "sleep_on_idle": True,  # else it keeps a core busy while nothing is to be done
            "max_total_tokens": cache_tokens(config),
        }
    else:
        arguments["mem_fraction_static"] = config.gpu_memory_fraction
    return {**arguments, **config.server_args}


def check_model(config: SglangConfig) -> None:
    """Refuse a model that is not there, shorter than the context, or of which SGLang's completions would end elsewhere.

    Raises:
        ConfigError: naming it.
    """
    ours, text = eos_token_ids(config.model_path), model_settings(config.model_path)
    found = text.get("eos_token_id")
    theirs: set[int] = set() if found is None else {found} if isinstance(found, int) else set(found)
    if theirs - set(ours):
        raise ConfigError(
            f"sglang: config.json of {config.model_path!r} ends sequences at {sorted(theirs)}, its generation_config.json at "
            f"{sorted(ours)}: SGLang would end completions at both, other adapters at the second; make them agree"
        )
    _check_heads(config, text)
    longest = text.get("max_position_embeddings")
    if longest is not None and config.max_model_len > longest:
        raise ConfigError(
            f"sglang: `max_model_len` is {config.max_model_len}, and the model in {config.model_path!r} was made for {longest} "
            "tokens (`max_position_embeddings`); lower it"
        )
    experts_of(config)


def experts_of(config: SglangConfig) -> tuple[int, int] | None:
    """Return layers and experts of a token, as SGLang records them; None where `record_experts` does not ask for them.

    Raises:
        ConfigError: the model has no experts, or layers without any among the others, for which SGLang would name some.
    """
    if not config.record_experts:
        return None
    text = model_settings(config.model_path)
    dense = (
        text.get("mlp_only_layers")
        or text.get("first_k_dense_replace")
        or text.get("decoder_sparse_step", 1) > 1
    )
    top_k = text.get("num_experts_per_tok")
    if not top_k or dense:
        raise ConfigError(
            f"sglang: `record_experts`: the model in {config.model_path!r} has {'dense layers' if top_k else 'no experts'}"
            f"{' among those of experts' if top_k else ''}; leave the setting out"
        )
    return int(text["num_hidden_layers"]), int(top_k)


def _check_heads(config: SglangConfig, text: dict[str, Any]) -> None:
    """Refuse heads that ranks cannot share: on a CPU SGLang would invent further ones, on GPUs end."""
    ranks = config.tensor_parallel_size
    heads = int(text.get("num_attention_heads") or 1)
    of_keys = int(text.get("num_key_value_heads") or heads)
    several_have_one = config.device == "cuda" and ranks % of_keys == 0
    if ranks > 1 and (heads % ranks or (of_keys % ranks and not several_have_one)):
        raise ConfigError(
            f"sglang: `tensor_parallel_size` is {ranks}, and the model in {config.model_path!r} has {heads} attention heads and "
            f"{of_keys} of keys and values, which so many devices cannot share; lower it"
        )


def cache_tokens(config: SglangConfig) -> int:
    """Return how many tokens have room in `kv_cache_gib`; at least two whole sequences.

    Raises:
        ConfigError: the model's settings do not say how large keys and values are.
    """
    text = model_settings(config.model_path)
    try:
        heads = int(text["num_attention_heads"])
        head_dim = int(text.get("head_dim") or text["hidden_size"] // heads)
        kv_heads = int(text.get("num_key_value_heads") or heads)
        of_rank = -(-kv_heads // config.tensor_parallel_size)
        token_bytes = 2 * int(text["num_hidden_layers"]) * of_rank * head_dim * BYTES[config.dtype]
    except KeyError as error:
        raise ConfigError(f"sglang: config.json of {config.model_path!r} has no {error}") from error
    return max(int(config.kv_cache_gib * GIB) // token_bytes, 2 * (config.max_model_len + MARGIN))


def model_settings(model_path: str) -> dict[str, Any]:
    """Return what config.json says of the language model.

    Raises:
        ConfigError: there is none.
    """
    path = Path(model_path) / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{model_path!r} holds no config.json; `model_path` must be a local Hugging Face folder"
        )
    found = json.loads(path.read_text(encoding="utf-8"))
    return found.get("text_config", found)


def _words(name: str, value: object) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, dict):
        return [flag, json.dumps(value)]
    if isinstance(value, list | tuple):
        return [flag, *map(str, cast("Sequence[object]", value))]
    return [flag, str(value)]
