"""Low-rank adapters in a dozen plain lines, to compare an engine's with (arXiv 2106.09685).

A linear layer W becomes W + alpha / rank B A, with A [rank, in] and B [out, rank]; only A and B are trained. They
go by the names that peft writes to its files: `base_model.model.<module>.lora_A.weight` and `.lora_B.weight`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from offbeat_engine.config import LoraConfig

Named = dict[str, torch.Tensor]

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
