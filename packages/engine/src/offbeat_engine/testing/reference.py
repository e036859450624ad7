"""The slow, plain way: one sequence at a time, whole logits, no packing, no sharding, no chunking.

Low-rank adapters in a dozen plain lines, to compare an engine's with (arXiv 2106.09685).

A linear layer W becomes W + alpha / rank B A, with A [rank, in] and B [out, rank]; only A and B are trained. They
go by the names that peft writes to its files: `base_model.model.<module>.lora_A.weight` and `.lora_B.weight`.

Experts that are given, not chosen: drawn for a batch, and forced on a plain model.
"""

# transformers' auto classes answer with unknown types.
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import fnmatch
import re
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

from offbeat_engine.batch import LossScale, units_of
from offbeat_engine.config import LoraConfig, LoraExport, OptimizerConfig
from offbeat_engine.testing.compare import Named, relative_error
from offbeat_engine.testing.models import without_bars
from offbeat_engine.toolkit.step.schedules import learning_rate

if TYPE_CHECKING:
    from collections.abc import Generator

    from offbeat_engine.batch import LossFn, Predictions, TrainBatch


_PREFIX = "base_model.model."


class _Adapted(torch.nn.Module):
    def __init__(
        self, base: torch.nn.Linear, lora_a: torch.Tensor, lora_b: torch.Tensor, scale: float
    ) -> None:
        super().__init__()
        self.base = base
        self.lora_a = torch.nn.Parameter(lora_a.clone())
        self.lora_b = torch.nn.Parameter(lora_b.clone())
        self.scale = scale

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        low = torch.nn.functional.linear(states, self.lora_a)
        return self.base(states) + self.scale * torch.nn.functional.linear(low, self.lora_b)


def adapted_modules(model: Any, config: LoraConfig) -> list[str]:
    """Return the names of the linear layers that `config` adapts: by their endings, or all but the head."""
    head = model.get_output_embeddings()
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    if config.targets:
        return [name for name in linear if any(name.endswith(ending) for ending in config.targets)]
    return [name for name, layer in linear.items() if layer is not head]


def adapt(model: Any, config: LoraConfig, adapter: Named) -> dict[str, torch.nn.Parameter]:
    """Freeze `model`, put adapters with the values of `adapter` on it, and return them by name.

    Raises:
        AssertionError: `adapter` does not hold A and B for exactly the layers that `config` names.
    """
    model.requires_grad_(False)
    modules = adapted_modules(model, config)
    expected = {f"{_PREFIX}{name}.lora_{half}.weight" for name in modules for half in "AB"}
    if expected != adapter.keys():
        raise AssertionError(
            f"the adapter should hold A and B of {len(modules)} layers; missing: "
            f"{sorted(expected - adapter.keys())}, unexpected: {sorted(adapter.keys() - expected)}"
        )
    trained: dict[str, torch.nn.Parameter] = {}
    for name in modules:
        parent_name, _, last = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        halves = [f"{_PREFIX}{name}.lora_{half}.weight" for half in "AB"]
        layer = _Adapted(
            getattr(parent, last), adapter[halves[0]], adapter[halves[1]], config.alpha / config.rank
        )
        setattr(parent, last, layer)
        trained |= {halves[0]: layer.lora_a, halves[1]: layer.lora_b}
    return trained


def merged_tensors(model: Any) -> Named:
    """Return all weights of an adapted model by their names without adapters, with these merged in."""
    merged: Named = {}
    for name, param in model.named_parameters():
        if name.endswith((".lora_a", ".lora_b")):
            continue
        value = param.detach().clone()
        module_name, _, last = name.rpartition(".")
        if module_name.endswith(".base"):
            layer: _Adapted = model.get_submodule(module_name.removesuffix(".base"))
            if last == "weight":
                value += layer.scale * layer.lora_b.detach() @ layer.lora_a.detach()
            name = f"{module_name.removesuffix('.base')}.{last}"
        merged[name] = value
    return merged


__all__ = [
    "Reference",
    "Setup",
    "load_reference",
    "reference_logprobs",
    "reference_run",
    "reference_step",
    "relative_error",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is trained and how; the same words as in `EngineConfig`.

    `adapter` holds the adapter's first values by name as in peft's files (see `adapt`); `bfloat16`
    computes in that precision on float32 master weights, without any care beyond that.
    """

    path: str
    optimizer: OptimizerConfig
    head: str = "lm"
    freeze: tuple[str, ...] = ()
    lora: LoraConfig | None = None
    adapter: Named = field(default_factory=dict[str, torch.Tensor])
    bfloat16: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What a plain training run comes to, one entry per step; tensors go by the names of the model's files.

    `grads` are those of the last step and `first_grads` of the first, before clipping; `predictions` are the
    first step's. `weights` are the last, `weights_after` those after so many steps, 0 being the start.
    """

    losses: list[float]
    grad_norms: list[float]
    rates: list[float]
    predictions: Predictions
    first_grads: Named
    grads: Named
    weights: Named
    weights_after: dict[int, Named]


class _Plain(torch.nn.Module):
    """A Hugging Face model that is asked about one sequence at a time."""

    def __init__(self, hf: Any, head: str) -> None:
        super().__init__()
        self.hf = hf
        self.head = head

    def forward(
        self, ids: torch.Tensor, temperature: float, experts: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Return what is predicted at the tokens after the first, float32 [length - 1] each."""
        with replayed(self.hf, experts):
            return self._answers(ids, temperature)

    def _answers(self, ids: torch.Tensor, temperature: float) -> dict[str, torch.Tensor]:
        if self.head == "value":
            # Not `self.hf(ids)`: its dropout before the head belongs to classification.
            states_TH = self.hf.base_model(ids[None]).last_hidden_state[0]
            return {"values": self.hf.score(states_TH).float()[:-1, 0]}
        logprobs_TV = (self.hf(ids[None]).logits[0].float() / temperature).log_softmax(-1)
        picked = logprobs_TV[:-1].gather(1, ids[1:, None]).squeeze(1)
        return {"logprobs": picked, "entropy": -(logprobs_TV.exp() * logprobs_TV).sum(-1)[:-1]}


def load_reference(path: str, head: str = "lm") -> Any:
    """Return the model of `path` in float32 with eager attention."""
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    auto: Any = AutoModelForTokenClassification if head == "value" else AutoModelForCausalLM
    with without_bars():
        return auto.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def reference_logprobs(model: Any, batch: TrainBatch) -> Predictions:
    """Return log-probabilities and entropy as `Predictions`, with gradient, from whole logits per sequence."""
    return _predict(_Plain(model, "lm"), batch, bfloat16=False)


def _predict(plain: _Plain, batch: TrainBatch, *, bfloat16: bool) -> Predictions:
    num_rows, num_tokens = batch["input_ids"].shape
    unrounded = plain.hf._get_dtype_plan(torch.bfloat16)  # noqa: SLF001 what `from_pretrained` loads in float32
    low = {
        name: param.to(torch.bfloat16)
        for name, param in plain.named_parameters()
        if bfloat16 and not any(re.search(pattern, name) for pattern in unrounded)
    }
    rows: dict[str, list[torch.Tensor]] = {}
    for number in range(num_rows):
        length = int(batch["lengths"][number])
        temperature = float(batch["temperature"][number]) if "temperature" in batch else 1.0
        experts = batch["routed_experts"][number, :length] if "routed_experts" in batch else None
        inputs = (batch["input_ids"][number, :length], temperature, experts)
        answers = torch.func.functional_call(plain, low, inputs) if bfloat16 else plain(*inputs)
        for name, values in answers.items():
            padded = torch.nn.functional.pad(values, (1, num_tokens - length))
            rows.setdefault(name, []).append(padded * batch["loss_mask"][number])
    return TensorDict({name: torch.stack(row) for name, row in rows.items()}, batch_size=[num_rows])  # pyright: ignore[reportArgumentType]


def reference_step(
    path: str, batches: list[TrainBatch], loss_fn: LossFn, config: OptimizerConfig
) -> Reference:
    """Train on each of `batches` in turn with torch's own optimizer and clipping, on one process."""
    return reference_run(Setup(path=path, optimizer=config), batches, loss_fn)


def reference_run(
    setup: Setup, batches: list[TrainBatch], loss_fn: LossFn, keep_after: tuple[int, ...] = ()
) -> Reference:
    """Train as `setup` says on each of `batches` in turn, one optimizer step each."""
    model = load_reference(setup.path, setup.head)
    trained = _choose_trained(model, setup)
    optimizer = _optimizer(setup.optimizer, list(trained.values()))
    plain = _Plain(model, setup.head).train()
    losses: list[float] = []
    norms: list[float] = []
    rates: list[float] = []
    kept: dict[int, Named] = {}
    first: tuple[Predictions, Named] | None = None
    grads: Named = {}
    for step, batch in enumerate(batches):
        if step in keep_after:
            kept[step] = _weights(model, setup, trained)
        rates.append(learning_rate(setup.optimizer, step))
        for group in optimizer.param_groups:
            group["lr"] = rates[-1]
        optimizer.zero_grad()
        num_rows = batch.batch_size[0]
        scale = LossScale(
            num_tokens=int(batch["loss_mask"].sum()),
            num_sequences=num_rows,
            num_units=len(set(units_of(batch) or range(num_rows))),
        )
        predictions = _predict(plain, batch, bfloat16=setup.bfloat16)
        loss = loss_fn(predictions, batch, scale).loss
        loss.backward()
        grads = {name: param.grad.clone() for name, param in trained.items() if param.grad is not None}
        first = first or (predictions.detach(), grads)
        limit = setup.optimizer.max_grad_norm
        limit = limit if limit > 0 else float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(list(trained.values()), limit)))
        optimizer.step()
        losses.append(float(loss.detach()))
    assert first is not None, "a reference run needs at least one batch"
    weights = _weights(model, setup, trained)
    return Reference(
        losses=losses,
        grad_norms=norms,
        rates=rates,
        predictions=first[0],
        first_grads=first[1] if setup.lora else _as_in_files(model, setup, first[1]),
        grads=grads if setup.lora else _as_in_files(model, setup, grads),
        weights=weights,
        weights_after={**kept, len(batches): weights},
    )


def _choose_trained(model: Any, setup: Setup) -> dict[str, torch.nn.Parameter]:
    if setup.lora is not None:
        return adapt(model, setup.lora, setup.adapter)
    trained: dict[str, torch.nn.Parameter] = {}
    for name, param in model.named_parameters():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in setup.freeze):
            param.requires_grad_(False)
        else:
            trained[name] = param
    return trained


def _optimizer(config: OptimizerConfig, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        params,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        foreach=False,
    )


def _weights(model: Any, setup: Setup, trained: dict[str, torch.nn.Parameter]) -> Named:
    if setup.lora is not None and setup.lora.export is LoraExport.ADAPTER:
        return {name: param.detach().clone() for name, param in trained.items()}
    if setup.lora is not None:
        return _as_in_files(model, setup, merged_tensors(model))
    named = {name: param.detach().clone() for name, param in model.named_parameters()}
    return _as_in_files(model, setup, named)


def _as_in_files(model: Any, setup: Setup, tensors: Named) -> Named:
    """Rename, and cut up where need be, from the names in memory to those that `save_pretrained` writes."""
    from safetensors import safe_open
    from safetensors.torch import load_file

    with safe_open(Path(setup.path) / "model.safetensors", "pt") as file:
        if tensors.keys() <= set(file.keys()):
            return tensors
    with TemporaryDirectory(prefix="offbeat-reference-") as folder, without_bars():
        model.save_pretrained(folder, state_dict=tensors)
        return load_file(Path(folder) / "model.safetensors")


# T = tokens, L = layers, K = experts of a token, E = all experts.


def with_drawn_experts(
    batch: TrainBatch, num_layers: int, num_experts: int, top_k: int, *, for_all: bool = False
) -> TrainBatch:
    """Return `batch` with different experts for each token of it, drawn from its own ids.

    Every third sequence has none, and keeps its own choice, unless they are drawn `for_all`.
    """
    shape = (*batch["input_ids"].shape, num_layers, num_experts)
    draw = torch.rand(shape, generator=torch.Generator().manual_seed(int(batch["input_ids"].sum())))
    experts_BTK = draw.argsort(-1)[..., :top_k].flatten(2).to(torch.int16)
    if not for_all:
        experts_BTK[::3] = -1
    batch = batch.copy()
    batch["routed_experts"] = experts_BTK
    return batch


@contextmanager
def replayed(model: Any, experts_TK: torch.Tensor | None) -> Generator[None]:
    """Let transformers' routers of `model` take these experts, layer after layer, where they are not -1.

    Raises:
        AssertionError: the model has none of transformers' routers (5 and later).
    """
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    if experts_TK is None:
        yield
        return
    assert routers, (
        "experts can be forced on models of transformers 5, whose routers are modules of their own"
    )
    with ExitStack() as stack:
        experts_TLK = experts_TK.unflatten(1, (len(routers), -1)).long()
        for layer, router in enumerate(routers):
            forced = partial(_forced, experts_TLK[:, layer])
            stack.callback(router.register_forward_hook(forced).remove)
        yield


def _forced(experts_TK: torch.Tensor, router: Any, _: object, output: Any) -> Any:
    logits_TE, _, own_TK = output
    index_TK = torch.where(experts_TK < 0, own_TK, experts_TK)
    scores_TK = logits_TE.float().softmax(-1).gather(1, index_TK)
    if getattr(router, "norm_topk_prob", True):
        scores_TK = scores_TK / scores_TK.sum(-1, keepdim=True)
    return logits_TE, scores_TK.to(logits_TE.dtype), index_TK
