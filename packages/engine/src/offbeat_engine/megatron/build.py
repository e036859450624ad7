"""What `init_model` makes of a config, in order: groups, model, values, names, optimizer."""

# transformers' configs and megatron-core are untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from offbeat_engine.errors import ConfigError
from offbeat_engine.megatron import families, model, transformer_engine
from offbeat_engine.megatron.groups import make_groups
from offbeat_engine.megatron.held import held_by
from offbeat_engine.megatron.leaving import Leaving
from offbeat_engine.megatron.loading import fill, hf_config, source_of
from offbeat_engine.megatron.updater import Updater, wrapped
from offbeat_engine.toolkit.collectives import first_failure
from offbeat_engine.toolkit.hf.rotary import sequence_limit
from offbeat_engine.toolkit.step.throughput import ModelCost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat_engine.megatron.config import MegatronConfig
    from offbeat_engine.megatron.families import Shape
    from offbeat_engine.megatron.groups import Groups
    from offbeat_engine.megatron.held import Held
    from offbeat_engine.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A built engine; `updater` is None where nothing is trained, and `trained` are the names of what is, on any rank.

    `with_te`: of Transformer Engine's layers.
    """

    groups: Groups
    shape: Shape
    chunks: Sequence[model.Chunk]
    held: Sequence[Held]
    leaving: Leaving
    updater: Updater | None
    trained: frozenset[str]
    sequence_limit: int | None
    with_te: bool
    cost: ModelCost


def build_parts(config: MegatronConfig, world: World) -> Parts:
    """Build everything; a collective.

    Raises:
        ConfigError: the folder holds no model that fits the config, on some rank.
    """
    found = hf_config(config.model)
    shape = families.shape_of(found, config.model.head)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core's, of packages that it would rather have
        groups = make_groups(config, world)
        with_te = transformer_engine.is_used(config, world)
        with groups.lent():
            models = model.build(config, shape, found, groups, with_te)
            plain = [model.Chunk(model=one, wrapped=one) for one in models]
            held = held_by(plain, shape, groups, config.model.head)
            trained = _freeze(config, held, shape)
            chunks = wrapped(config, models)
            updater = None if config.inference_only else Updater(config, chunks)
            # After the wrapper, which copies weights into a buffer of its own: before, values would be in memory twice. And after
            # the optimizer, whose master weights are as exact as the files.
            _fill_together(config, world, held, found, updater)
            leaving = Leaving.agreed(world, held, shape, config.model.head, groups.tensor)
    return Parts(
        groups=groups,
        shape=shape,
        chunks=chunks,
        held=held,
        leaving=leaving,
        updater=updater,
        trained=trained,
        sequence_limit=sequence_limit(found),
        with_te=with_te,
        cost=cost_of(shape, config.model.head, frozenset() if config.inference_only else trained),
    )


def cost_of(shape: Shape, head: str, trained: frozenset[str]) -> ModelCost:
    """Return what arithmetic counts of the whole model; `trained` are the names of what is trained."""
    visited = shape.experts_per_token / shape.num_experts if shape.num_experts else 1.0
    num_params = num_trained = 0.0
    for entry, layer, expert in families.entries(shape, head):
        if entry is families.EMBEDDING and not shape.tied:
            continue  # looked up
        for name, whole in zip(
            families.names(entry, layer, expert), families.whole_shapes(entry, shape), strict=True
        ):
            counted = math.prod(whole) * (1.0 if expert is None else visited)
            num_params += counted
            num_trained += counted if name in trained else 0.0
    return ModelCost(
        num_params=round(num_params),
        num_trained=round(num_trained),
        num_layers=shape.num_layers,
        attention_width=shape.num_heads * shape.head_dim,
    )


def _fill_together(
    config: MegatronConfig,
    world: World,
    held: Sequence[Held],
    found: Any,  # noqa: ANN401 a config of transformers
    updater: Updater | None,
) -> None:
    """Read the weights on every rank or raise on every rank."""
    error: Exception | None = None
    try:
        shape, spread = families.shape_of(found, config.model.head), found.initializer_range
        fill(held, source_of(config.model, shape, spread), config.model, spread, updater)
    except (OSError, RuntimeError, ValueError) as caught:
        error = caught
    failure = first_failure(world, error)
    if failure is not None:
        raise ConfigError(f"the weights could not be read from their files: {failure}") from error


def _freeze(config: MegatronConfig, held: Sequence[Held], shape: Shape) -> frozenset[str]:
    """Take every weight whose name in the files matches one of `freeze`; return the names of all others.

    Raises:
        ConfigError: a pattern matches nothing, or a part of what is held as one weight, or nothing is left to train.
    """
    listed = families.entries(shape, config.model.head)
    called = [families.names(*one) for one in listed]
    for pattern in config.freeze:
        if not any(fnmatchcase(name, pattern) for names in called for name in names):
            raise ConfigError(f"`freeze`: no weight matches {pattern!r} (tied weights go by one name)")

    def frozen(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in config.freeze)

    for names in called:
        if len({frozen(name) for name in names}) > 1:
            raise ConfigError(
                f"`freeze`: the model holds {', '.join(f'`{name}`' for name in names)} as one weight; freeze all or none"
            )
    if all(frozen(names[0]) for names in called):
        raise ConfigError(f"`freeze`: {list(config.freeze)} leave nothing to train; name fewer weights")
    for one in held:
        if config.inference_only or any(frozen(block.name) for block in one.blocks):
            one.param.requires_grad_(False)
    return frozenset(name for names in called for name in names if not frozen(name))
