"""Experts that replicas record and the training engine replays: what stands in the way, and what they take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat_engine.capabilities import Feature, Refusal
from offbeat_engine.registry import engine_class
from offbeat_recipes.plan.memory import Memory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from offbeat_recipes.plan.facts import Facts
    from offbeat_recipes.settings.tree import RunConfig

_SETTING = "rollout.record_experts"
_NUMBER = 2  # bytes


def expert_refusals(config: RunConfig, facts: Facts) -> Iterator[Refusal]:
    """Refuse to record experts where there are none, or where nothing would replay them."""
    if not recorded(config):
        return
    if facts.model is not None and not facts.model.experts_per_token:
        yield Refusal(_SETTING, "the model has no experts to choose among", "leave it out")
    name = config.engine.name
    engine = engine_class(name).capabilities()
    if Feature.ROUTED_EXPERTS not in engine.features:
        why = engine.missing.get(Feature.ROUTED_EXPERTS, "it does not say them")
        yield Refusal(
            _SETTING,
            f"the engine {name} does not replay them: {why}",
            "leave it out, or take engine=fsdp2 or megatron",
        )
    elif getattr(config.engine, "compile", False):  # a setting that not every engine has
        yield Refusal(
            "engine.compile",
            "compiled layers choose experts themselves",
            "engine.compile=false, or record none",
        )


def expert_bytes(config: RunConfig, facts: Facts, tokens: int) -> int:
    """Return what the recorded experts of `tokens`, padding included, take: of every layer those of a token."""
    if facts.model is None or not recorded(config):
        return 0
    return _NUMBER * tokens * facts.model.experts_per_token


def expert_memory(config: RunConfig, facts: Facts, tokens: int) -> Memory | None:
    """Return what a step's recorded experts take where its batch is: on the driver, and on every rank."""
    num_bytes = expert_bytes(config, facts, tokens)
    if not num_bytes:
        return None
    return Memory(
        process="driver, and each training rank, in host memory",
        num=1 + config.engine.num_ranks,
        items=((f"experts of {tokens} tokens, two bytes each, at most", num_bytes),),
        certain=0,
    )


def recorded(config: RunConfig) -> bool:
    """Whether replicas run, and record."""
    return config.generates and config.rollout.record_experts
