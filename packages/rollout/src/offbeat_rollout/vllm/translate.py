"""Our values to vLLM's and back."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportMissingTypeStubs=false
# vLLM types its interfaces in part.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from offbeat_rollout.errors import EngineStateError
from offbeat_rollout.types import Completion, Finish, TopLogprobs, version_spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm import SamplingParams as VllmSamplingParams

    from offbeat_rollout.types import GenerateRequest


def sampling_params(request: GenerateRequest, eos: Sequence[int]) -> VllmSamplingParams:
    """Return vLLM's parameters for a checked request; `eos` ends it like its own stop tokens."""
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    greedy = sampling.temperature == 0
    return VllmSamplingParams(
        temperature=sampling.temperature,
        top_p=1.0 if greedy else sampling.top_p,
        top_k=0 if greedy or sampling.top_k == -1 else sampling.top_k,
        max_tokens=sampling.max_tokens,
        # Every 64 bits are a seed here; vLLM takes those of a signed integer.
        seed=None if sampling.seed is None else sampling.seed % 2**63,
        stop_token_ids=sorted({*sampling.stop_token_ids, *eos}),
        ignore_eos=True,  # end-of-sequence tokens are in `stop_token_ids`, the same for every adapter
        logprobs=sampling.top_logprobs,  # beside the sampled token's own
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        skip_special_tokens=False,  # a text to stop at may be one
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def version_of(label: str | None) -> int:
    """Return the version a weight label names; vLLM calls the weights it started with "default"."""
    if label is None or label == "default":
        return 0
    try:
        return int(label)
    except ValueError:
        raise EngineStateError(
            f"vLLM serves weights labelled {label!r}, which is no version number; "
            "something other than this adapter updated them"
        ) from None


def completion(request: GenerateRequest, output: Any) -> Completion:  # noqa: ANN401 - vllm.RequestOutput
    """Return the completion in a finished `RequestOutput`."""
    answer = output.outputs[0]
    count = len(answer.token_ids)
    labelled = answer.weight_versions  # None where no label was ever given
    runs = [(0, count)] if labelled is None else [(version_of(s.version), s.end - s.start) for s in labelled]
    match answer.finish_reason:
        case "stop" | "length" | "abort" as reason:
            finish = Finish(reason)
        case other:
            raise EngineStateError(f"vLLM ended request {request.request_id!r} with {other!r}; see its log")
    # An entry per position for the sampled token, then those of the most likely ones.
    num_top, flat = request.sampling.top_logprobs, answer.logprobs
    logprobs = np.array(() if flat is None else flat.logprobs, np.float32).reshape(count, 1 + num_top)
    top = None
    if num_top:
        ids = np.array(() if flat is None else flat.token_ids, np.int32).reshape(count, 1 + num_top)
        top = TopLogprobs(token_ids=ids[:, 1:].copy(), logprobs=logprobs[:, 1:].copy())
    return Completion(
        request_id=request.request_id,
        token_ids=np.array(answer.token_ids, np.int32),
        logprobs=logprobs[:, 0].copy(),
        spans=version_spans(runs),
        finish=finish,
        stop_reason=answer.stop_reason,
        num_cached_tokens=output.num_cached_tokens,
        top_logprobs=top,
    )
