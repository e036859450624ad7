"""The slow, plain way: one sequence at a time, whole logits, no packing, no sharding, no chunking."""

# transformers' auto classes answer with unknown types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

from offbeat_engine.interface import LossScale
from offbeat_engine.schedules import learning_rate

if TYPE_CHECKING:
    from offbeat_engine.batch import TrainBatch
    from offbeat_engine.config import OptimizerConfig
    from offbeat_engine.interface import LossFn, Predictions


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What a plain training run comes to; `grads` are the last step's, before clipping, as `weights` by name."""

    losses: list[float]
    grad_norms: list[float]
    grads: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def load_reference(path: str) -> Any:  # noqa: ANN401
    """Return the model of `path` in float32 with eager attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def reference_logprobs(model: Any, batch: TrainBatch) -> Predictions:  # noqa: ANN401
    """Return log-probabilities and entropy as `Predictions`, with gradient, from whole logits per sequence."""
    shape = batch["input_ids"].shape
    rows: dict[str, list[torch.Tensor]] = {"logprobs": [], "entropy": []}
    for number in range(shape[0]):
        length = int(batch["lengths"][number])
        ids = batch["input_ids"][number, :length]
        temperature = batch["temperature"][number] if "temperature" in batch else 1.0
        logprobs_TV = (model(ids[None]).logits[0].float() / temperature).log_softmax(-1)
        picked = logprobs_TV[:-1].gather(1, ids[1:, None]).squeeze(1)
        entropy = -(logprobs_TV.exp() * logprobs_TV).sum(-1)[:-1]
        for name, values in (("logprobs", picked), ("entropy", entropy)):
            padded = torch.nn.functional.pad(values, (1, shape[1] - length))
            rows[name].append(padded * batch["loss_mask"][number])
    return TensorDict({name: torch.stack(row) for name, row in rows.items()}, batch_size=[shape[0]])


def reference_step(
    path: str, batches: list[TrainBatch], loss_fn: LossFn, config: OptimizerConfig
) -> Reference:
    """Train on each of `batches` in turn with `torch.optim.AdamW` and torch's own clipping, on one process."""
    model = load_reference(path).train()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        foreach=False,
    )
    losses: list[float] = []
    norms: list[float] = []
    grads: dict[str, torch.Tensor] = {}
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        optimizer.zero_grad()
        scale = LossScale(num_tokens=int(batch["loss_mask"].sum()), num_sequences=batch.batch_size[0])
        loss = loss_fn(reference_logprobs(model, batch), batch, scale).loss
        loss.backward()
        grads = {name: param.grad.clone() for name, param in model.named_parameters()}
        limit = config.max_grad_norm if config.max_grad_norm > 0 else float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
        losses.append(float(loss.detach()))
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return Reference(losses=losses, grad_norms=norms, grads=grads, weights=weights)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return |got - expected| / |expected| in L2; the absolute error where nothing is expected."""
    scale = float(expected.double().norm())
    error = float((got.double() - expected.double()).norm())
    return error / scale if scale else error
