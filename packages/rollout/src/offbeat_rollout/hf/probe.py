"""The running batch against the model's own plain forward, on a few tokens, before anything is served."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# transformers' models are typed loosely.

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

import torch

from offbeat_rollout.errors import ConfigError
from offbeat_rollout.hf.cache import ATTENTION_NAME
from offbeat_rollout.hf.decode import RunningBatch, new_row
from offbeat_rollout.types import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from offbeat_rollout.config import RolloutConfig
    from offbeat_rollout.hf.decode import Row

_PROMPTS, _STEPS = (19, 5), 6
# Of the median: a router may choose otherwise once. Right paths came to 1e-5 here, in bfloat16 to 0.11, wrong ones to 0.15 and more.
_TOLERANCE = {"float32": 1e-2, "bfloat16": 0.3}


def require_plain(model: PreTrainedModel, config: RolloutConfig) -> None:
    """Refuse a model that does not generate here what its plain forward says.

    Raises:
        ConfigError: it has something that this adapter's attention, cache or positions leave out.
    """
    name = type(model).__name__
    try:
        rows = _generated(model, config.max_model_len)
        model.set_attn_implementation("eager")
        gaps = [gap for row in rows for gap in _gaps(model, row)]
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise ConfigError(f"the hf adapter cannot run {name}: {error!r}; use vllm") from error
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    apart = median(gaps)
    if not apart <= _TOLERANCE[config.dtype]:
        raise ConfigError(
            f"{name} has something that the hf adapter leaves out: log-probs of a few tokens are {apart:.2g} from those of "
            "its plain forward; use vllm"
        )


def _generated(model: PreTrainedModel, max_model_len: int) -> list[Row]:
    batch = RunningBatch(model, 1)
    rows: list[Row] = []
    for length in _PROMPTS:
        prompt = tuple(
            7 * place % batch.vocab_size for place in range(max(1, min(length, max_model_len - _STEPS)))
        )
        sampling = SamplingParams(max_tokens=_STEPS, temperature=0.0)
        request = GenerateRequest(request_id="probe", prompt_ids=prompt, sampling=sampling)
        rows.append(new_row(request, (), max_model_len))
    batch.join(rows)
    for _ in range(min(row.limit for row in rows)):
        batch.step(0)
    return batch.leave(lambda _: True)


@torch.inference_mode()
def _gaps(model: PreTrainedModel, row: Row) -> list[float]:
    ids = torch.tensor([row.known_ids], device=model.device)
    logprobs = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
    first = len(row.request.prompt_ids) - 1
    return [
        abs(float(logprobs[first + place, token]) - row.logprobs[place])
        for place, token in enumerate(row.token_ids)
    ]
