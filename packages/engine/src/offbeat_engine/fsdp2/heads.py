"""Log-probabilities and entropy of chosen tokens from hidden states; logits exist only a chunk at a time."""

# torch.autograd.Function is untyped: its context carries whatever forward put there.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any, cast

import torch

# M = tokens asked for, H = hidden size, V = vocabulary.

# Elements of logits that may exist at a time: a CPU likes to stay near its cache, a GPU likes large products.
_CHUNK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 27}
# Probabilities up to this many elements are kept for backward; above, they are computed again.
_KEEP_ELEMENTS = 1 << 24


def token_logprobs(
    hidden_MH: torch.Tensor,
    head: torch.nn.Linear,
    targets_M: torch.Tensor,
    temperature_M: torch.Tensor | None,
    entropy_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probability of each target and entropy of each distribution, float32 [M], in nats.

    Logits are taken in the compute dtype, as the model itself would, then everything is float32. The entropy
    carries a gradient only when `entropy_gradient`.
    """
    return cast(
        "tuple[torch.Tensor, torch.Tensor]",
        _TokenLogprobs.apply(hidden_MH, head.weight, head.bias, targets_M, temperature_M, entropy_gradient),
    )


class _TokenLogprobs(torch.autograd.Function):
    """With p = softmax(z), l = log p[target], S = -sum p log p: dl/dz = onehot - p, dS/dz = -p (log p + S)."""

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 torch wants tensors as positional arguments
        ctx: Any,  # noqa: ANN401 torch gives no type for it
        hidden_MH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_M: torch.Tensor,
        temperature_M: torch.Tensor | None,
        entropy_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens, vocab = hidden_MH.shape[0], weight_VH.shape[0]
        logprobs_M, entropy_M, lse_M = (
            torch.empty(num_tokens, dtype=torch.float32, device=hidden_MH.device) for _ in range(3)
        )
        keep = any(ctx.needs_input_grad[:3]) and num_tokens * vocab <= _KEEP_ELEMENTS
        kept: list[torch.Tensor] = []
        for part in _chunks(num_tokens, vocab, hidden_MH.device.type):
            logits = _logits(hidden_MH[part], weight_VH, bias_V, temperature_M, part)
            lse_M[part] = logits.logsumexp(-1)
            logprobs_M[part] = logits.gather(1, targets_M[part, None]).squeeze(1) - lse_M[part]
            probs = (logits - lse_M[part, None]).exp_()
            # mul + sum and not (p * log p): one pass less, and 0 * -inf cannot arise from finite logits.
            entropy_M[part] = lse_M[part] - (probs * logits).sum(-1)
            if keep:
                kept.append(probs)
        ctx.save_for_backward(hidden_MH, weight_VH, bias_V, targets_M, temperature_M, lse_M, entropy_M, *kept)
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_M)
        return logprobs_M, entropy_M

    @staticmethod
    def backward(ctx: Any, grad_logprobs_M: torch.Tensor, grad_entropy_M: torch.Tensor) -> tuple[Any, ...]:  # noqa: ANN401
        hidden_MH, weight_VH, bias_V, targets_M, temperature_M, lse_M, entropy_M, *kept = ctx.saved_tensors
        grad_hidden_MH = torch.empty_like(hidden_MH)
        # Sums over chunks are float32 whatever the compute dtype.
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        parts = _chunks(hidden_MH.shape[0], weight_VH.shape[0], hidden_MH.device.type)
        for number, part in enumerate(parts):
            if kept:
                probs = kept[number]
            else:
                logits = _logits(hidden_MH[part], weight_VH, bias_V, temperature_M, part)
                probs = (logits - lse_M[part, None]).exp_()
            grad = probs * -grad_logprobs_M[part, None]
            grad.scatter_add_(1, targets_M[part, None], grad_logprobs_M[part, None])
            if ctx.entropy_gradient:
                surprise = torch.xlogy(probs, probs) + probs * entropy_M[part, None]
                grad -= surprise * grad_entropy_M[part, None]
            if temperature_M is not None:
                grad /= temperature_M[part, None]
            if grad_bias_V is not None:
                grad_bias_V += grad.sum(0)
            grad = grad.to(hidden_MH.dtype)
            grad_hidden_MH[part] = grad @ weight_VH
            grad_weight_VH += grad.T @ hidden_MH[part]
        bias_grad = None if grad_bias_V is None else grad_bias_V.to(weight_VH.dtype)
        return grad_hidden_MH, grad_weight_VH.to(weight_VH.dtype), bias_grad, None, None, None


def _chunks(num_tokens: int, vocab: int, device: str) -> list[slice]:
    step = max(1, _CHUNK_ELEMENTS.get(device, 1 << 24) // vocab)
    return [slice(start, min(start + step, num_tokens)) for start in range(0, num_tokens, step)]


def _logits(
    hidden: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    temperature_M: torch.Tensor | None,
    part: slice,
) -> torch.Tensor:
    logits = torch.nn.functional.linear(hidden, weight_VH, bias_V).float()
    return logits if temperature_M is None else logits / temperature_M[part, None]
