"""Log-probabilities and entropy of chosen tokens from hidden states; logits exist only a chunk at a time."""

# torch.autograd.Function is untyped: its context carries whatever forward put there.
# pyright: reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.nn import functional

# ruff: noqa: N815 shapes ride in names, of fields too


# M = tokens asked for, H = hidden size, V = vocabulary.


@dataclass(frozen=True, slots=True)
class VocabShard:
    """This rank's part of the vocabulary: the head's rows here are those of the tokens from `first` on.

    The ranks of `group` have the same tokens to look at and, between them, every token of the vocabulary once, at least one
    each; parts may differ in size.
    """

    first: int
    group: dist.ProcessGroup

    def rows(self, targets_M: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row [M] of each target among the `num_rows` here, 0 for one of another rank, and which are here [M]."""
        own_M = targets_M - self.first
        here_M = (own_M >= 0) & (own_M < num_rows)
        return torch.where(here_M, own_M, 0), here_M

    def join(
        self, logprobs_M: torch.Tensor, here_M: torch.Tensor, lse_M: torch.Tensor, entropy_M: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return log-probabilities, log-sum-exps and entropies of the whole from those of the parts, float32 [M], in nats.

        A collective over `group`, of one maximum and one sum.

        The parts speak of the distribution over this rank's rows alone; log-probabilities count where `here_M`. With s for
        the shards and p_s for the share of each: lse = log sum exp(lse_s), S = sum p_s (S_s - log p_s), whose terms have one
        sign each.
        """
        top_M = lse_M.clone()
        dist.all_reduce(top_M, op=dist.ReduceOp.MAX, group=self.group)
        apart_M = lse_M - top_M
        share_M = apart_M.exp()
        # The target's logit over the highest lse, from the one rank that has it.
        target_M = torch.where(here_M, logprobs_M + apart_M, 0.0)
        sums = torch.stack((share_M, share_M * (entropy_M - apart_M), target_M))
        dist.all_reduce(sums, group=self.group)
        log_total_M = sums[0].log()
        return sums[2] - log_total_M, top_M + log_total_M, sums[1] / sums[0] + log_total_M


# Elements of logits that may exist at a time: a CPU likes to stay near its cache, a GPU likes large products.
_CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 27}
# Log-probabilities up to this many elements are kept for backward; above, they are computed again.
_KEEP_ELEMENTS = 1 << 24


def token_logprobs(
    hidden_MH: torch.Tensor,
    head: torch.nn.Linear,
    targets_M: torch.Tensor,
    temperature_M: torch.Tensor | None,
    entropy_gradient: bool,
    shard: VocabShard | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probability of each target and entropy of each distribution, float32 [M], in nats.

    Logits are taken in the compute dtype, as the model itself would, then everything is float32. The entropy
    carries a gradient only when `entropy_gradient`.

    With a `shard`, `head` holds this rank's rows of it and the call is a collective: all ranks of the shard's group get the
    same values. Targets are tokens of the whole vocabulary. The gradient of `hidden_MH` is this rank's part: those of the
    group add up to the whole, in the backward of whatever brought the hidden states to the ranks.
    """
    return cast(
        "tuple[torch.Tensor, torch.Tensor]",
        _TokenLogprobs.apply(
            hidden_MH, head.weight, head.bias, targets_M, temperature_M, entropy_gradient, shard
        ),
    )


class _TokenLogprobs(torch.autograd.Function):
    """With p = softmax(z), l = log p[target], S = -sum p log p: dl/dz = onehot - p, dS/dz = -p (log p + S).

    A frozen head needs no gradient of its own, and that of a hidden state is its token's incoming gradient times a
    vector that is known in the forward pass: then that is kept, H numbers a token, and backward costs nothing.
    Otherwise backward takes the logits once more, chunk by chunk.
    """

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 torch wants tensors as positional arguments
        ctx: Any,
        hidden_MH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_M: torch.Tensor,
        temperature_M: torch.Tensor | None,
        entropy_gradient: bool,
        shard: VocabShard | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens, vocab = hidden_MH.shape[0], weight_VH.shape[0]
        here_M = None
        if shard is not None:
            targets_M, here_M = shard.rows(targets_M, vocab)
        head = _Head(weight_VH, bias_V, targets_M, temperature_M)
        # What is kept for a frozen head needs the whole distribution, of which a shard knows after the last chunk.
        frozen = shard is None and ctx.needs_input_grad[0] and not any(ctx.needs_input_grad[1:3])
        keep = any(ctx.needs_input_grad[1:3]) and num_tokens * vocab <= _KEEP_ELEMENTS
        logprobs_M, entropy_M, lse_M = (
            torch.empty(num_tokens, dtype=torch.float32, device=hidden_MH.device) for _ in range(3)
        )
        kept = [torch.empty_like(hidden_MH) for _ in range(1 + entropy_gradient)] if frozen else []
        for part in _chunks(num_tokens, vocab, hidden_MH.device.type):
            logits = head.logits(hidden_MH, part)
            lse_M[part], entropy_M[part] = _normalize(logits)
            logprobs_M[part] = logits.gather(1, targets_M[part, None]).squeeze(1)
            if keep:
                kept.append(logits)
            if frozen:
                _keep_directions(head, logits, part, entropy_M, kept)
        if shard is not None and here_M is not None:
            own_lse_M = lse_M
            logprobs_M, lse_M, entropy_M = shard.join(logprobs_M, here_M, own_lse_M, entropy_M)
            for part, logp in zip(_chunks(num_tokens, vocab, hidden_MH.device.type), kept, strict=False):
                logp.add_((own_lse_M - lse_M)[part, None])
        tokens = (targets_M, here_M, temperature_M, lse_M, entropy_M)
        ctx.save_for_backward(hidden_MH, weight_VH, bias_V, *tokens, *kept)
        ctx.entropy_gradient, ctx.frozen = entropy_gradient, frozen
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_M)
        return logprobs_M, entropy_M

    @staticmethod
    def backward(ctx: Any, grad_logprobs_M: torch.Tensor, grad_entropy_M: torch.Tensor) -> tuple[Any, ...]:
        hidden_MH, weight_VH, bias_V, *tokens = ctx.saved_tensors
        targets_M, here_M, temperature_M, lse_M, entropy_M, *kept = tokens
        if ctx.frozen:
            grad_hidden = kept[0].float() * grad_logprobs_M[:, None]
            if ctx.entropy_gradient:
                grad_hidden.addcmul_(kept[1].float(), grad_entropy_M[:, None])
            return grad_hidden.to(hidden_MH.dtype), *[None] * 6
        head = _Head(weight_VH, bias_V, targets_M, temperature_M)
        grads = _Grads(hidden_MH, weight_VH, bias_V, ctx.needs_input_grad)
        parts = _chunks(hidden_MH.shape[0], weight_VH.shape[0], hidden_MH.device.type)
        for number, part in enumerate(parts):
            logp = kept[number] if kept else head.logits(hidden_MH, part).sub_(lse_M[part, None])
            if ctx.entropy_gradient:
                pull = (logp + entropy_M[part, None]).mul_(-grad_entropy_M[part, None])
                grad = logp.exp().mul_(pull.sub_(grad_logprobs_M[part, None]))
            else:
                grad = (logp.exp() if kept else logp.exp_()).mul_(-grad_logprobs_M[part, None])
            onehot_M = grad_logprobs_M if here_M is None else grad_logprobs_M * here_M
            grad.scatter_add_(1, targets_M[part, None], onehot_M[part, None])
            grads.add(part, head.per_logit(grad, part))
        return *grads.results(), *[None] * 4


def chosen_logprobs(
    hidden_MH: torch.Tensor,
    head: torch.nn.Linear,
    ids_MK: torch.Tensor,
    temperature_M: torch.Tensor | None,
) -> torch.Tensor:
    """Return log-probabilities of the tokens `ids_MK` int64 in each distribution, float32 [M, K], in nats, with a gradient.

    Logits exist a chunk at a time, and are taken once more in backward; `head` has all rows of the vocabulary.
    """
    return cast(
        "torch.Tensor",
        _ChosenLogprobs.apply(hidden_MH, head.weight, head.bias, ids_MK, temperature_M),
    )


def top_tokens(
    hidden_MH: torch.Tensor, head: torch.nn.Linear, top_k: int, temperature_M: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities float32 [M, K] of the K = min(`top_k`, V) likeliest tokens, and these int64 [M, K]; no gradient."""
    (num_tokens, device), vocab = (hidden_MH.shape[0], hidden_MH.device), head.weight.shape[0]
    with torch.no_grad():
        logprobs_MK = torch.empty(num_tokens, min(top_k, vocab), dtype=torch.float32, device=device)
        ids_MK = torch.empty(logprobs_MK.shape, dtype=torch.int64, device=device)
        parts = _Head(head.weight, head.bias, ids_MK, temperature_M)
        for part in _chunks(num_tokens, vocab, device.type):
            logits = parts.logits(hidden_MH, part)
            _normalize(logits)
            logprobs_MK[part], ids_MK[part] = logits.topk(logprobs_MK.shape[1], dim=-1)
    return logprobs_MK, ids_MK


class _ChosenLogprobs(torch.autograd.Function):
    """With p = softmax(z), l_k = log p[k]: dl_k/dz = onehot_k - p."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        ids_MK: torch.Tensor,
        temperature_M: torch.Tensor | None,
    ) -> torch.Tensor:
        head = _Head(weight_VH, bias_V, ids_MK, temperature_M)
        logprobs_MK = torch.empty(ids_MK.shape, dtype=torch.float32, device=hidden_MH.device)
        for part in _chunks(len(ids_MK), weight_VH.shape[0], hidden_MH.device.type):
            logits = head.logits(hidden_MH, part)
            _normalize(logits)
            logprobs_MK[part] = logits.gather(1, ids_MK[part])
        ctx.save_for_backward(hidden_MH, weight_VH, bias_V, ids_MK, temperature_M)
        return logprobs_MK

    @staticmethod
    def backward(ctx: Any, grad_MK: torch.Tensor) -> tuple[Any, ...]:
        hidden_MH, weight_VH, bias_V, ids_MK, temperature_M = ctx.saved_tensors
        head = _Head(weight_VH, bias_V, ids_MK, temperature_M)
        grads = _Grads(hidden_MH, weight_VH, bias_V, ctx.needs_input_grad)
        for part in _chunks(len(ids_MK), weight_VH.shape[0], hidden_MH.device.type):
            logp = head.logits(hidden_MH, part)
            _normalize(logp)
            grad = logp.exp_().mul_(-grad_MK[part].sum(1, keepdim=True))
            grad.scatter_add_(1, ids_MK[part], grad_MK[part])
            grads.add(part, head.per_logit(grad, part))
        return *grads.results(), None, None


class _Head(NamedTuple):
    """The linear layer and what goes with each of its rows."""

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None
    targets_M: torch.Tensor
    temperature_M: torch.Tensor | None

    def logits(self, hidden_MH: torch.Tensor, part: slice) -> torch.Tensor:
        """Return float32 logits of a chunk, over temperature; nobody else holds them."""
        logits = functional.linear(hidden_MH[part], self.weight_VH, self.bias_V).float()
        return logits if self.temperature_M is None else logits.div_(self.temperature_M[part, None])

    def per_logit(self, grad: torch.Tensor, part: slice) -> torch.Tensor:
        """Turn a gradient by tempered logits, in place, into one by the layer's output."""
        return grad if self.temperature_M is None else grad.div_(self.temperature_M[part, None])


class _Grads:
    """Gradients of hidden states, weight and bias, added up over chunks; None where nobody asks."""

    def __init__(
        self, hidden_MH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, needs: Any
    ) -> None:
        self._hidden_MH, self._weight_VH = hidden_MH, weight_VH
        # Sums over chunks are float32 whatever the compute dtype.
        self._hidden_grad = torch.empty_like(hidden_MH) if needs[0] else None
        self._weight_grad = torch.zeros_like(weight_VH, dtype=torch.float32) if needs[1] else None
        self._bias_grad = (
            torch.zeros_like(bias_V, dtype=torch.float32) if needs[2] and bias_V is not None else None
        )

    def add(self, part: slice, grad: torch.Tensor) -> None:
        """Count in a chunk whose float32 gradient by the layer's output is `grad`."""
        if self._bias_grad is not None:
            self._bias_grad += grad.sum(0)
        grad = grad.to(self._hidden_MH.dtype)
        if self._hidden_grad is not None:
            torch.mm(grad, self._weight_VH, out=self._hidden_grad[part])
        if self._weight_grad is None:
            return
        if grad.dtype is torch.float32:
            self._weight_grad.addmm_(grad.T, self._hidden_MH[part])
        else:
            self._weight_grad += grad.T @ self._hidden_MH[part]

    def results(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Return the three gradients in the dtypes of what they belong to."""
        dtype = self._weight_VH.dtype
        weight, bias = self._weight_grad, self._bias_grad
        return (
            self._hidden_grad,
            weight if weight is None else weight.to(dtype),
            bias if bias is None else bias.to(dtype),
        )


def _normalize(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn logits into log-probabilities, in place; return log-sum-exp and entropy of each row, with one exponential.

    With y = z - max z: S = log sum exp(y) - sum p y. Its terms have one sign, and torch adds a row up in pairs. One dot
    product of p and z as they are would cancel against their common offset and add 10^5 terms in a line: at a real
    vocabulary that costs the fourth digit.
    """
    top = logits.amax(-1, keepdim=True)
    powers = logits.sub_(top).exp()
    total = powers.sum(-1)
    log_total = total.log()
    entropy = log_total - powers.mul_(logits).sum(-1) / total
    logits.sub_(log_total[:, None])
    return log_total + top.squeeze(1), entropy


def _keep_directions(
    head: _Head, logp: torch.Tensor, part: slice, entropy_M: torch.Tensor, kept: list[torch.Tensor]
) -> None:
    """Write into `kept` where hidden states would go to raise their log-probability, and their entropy.

    The target is added to -p before the product: in bfloat16 the difference of two products would lose a
    confident token's small gradient.
    """
    dtype = head.weight_VH.dtype
    probs = logp.exp()
    if len(kept) > 1:
        pull = (logp + entropy_M[part, None]).mul_(probs).neg_()
        torch.mm(head.per_logit(pull, part).to(dtype), head.weight_VH, out=kept[1][part])
    ones = torch.ones_like(head.targets_M[part, None], dtype=torch.float32)
    pull = probs.neg_().scatter_add_(1, head.targets_M[part, None], ones)
    torch.mm(head.per_logit(pull, part).to(dtype), head.weight_VH, out=kept[0][part])


def _chunks(num_tokens: int, vocab: int, device: str) -> list[slice]:
    step = max(1, _CHUNK_ELEMENTS.get(device, 1 << 24) // vocab)
    return [slice(start, min(start + step, num_tokens)) for start in range(0, num_tokens, step)]
