"""What every adapter checks before it starts anything, so that all refuse the same things in the same words."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from offbeat_rollout.errors import ConfigError, RequestError
from offbeat_rollout.types import RolloutFeature

if TYPE_CHECKING:
    from offbeat_rollout.config import RolloutConfig
    from offbeat_rollout.types import GenerateRequest, RolloutCapabilities, SamplingParams


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
    path = Path(config.model_path) / "config.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return found.get("text_config", found)
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"cannot read the config.json in {config.model_path!r}: {error}") from error


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


def check_request(request: GenerateRequest, config: RolloutConfig, vocab_size: int) -> None:
    """Refuse a request that an engine with the settings `config` can never serve.

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
        ConfigError: the folder holds no config.json.
    """
    folder = Path(model_path)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{model_path!r} holds no config.json; `model_path` must be a local Hugging Face folder"
        )
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return tuple(cast("list[int]", found)) if isinstance(found, list) else (int(found),)
    return ()
