"""What `init_model` makes of a config, in order: model, shards, groups, optimizer, and where they wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat_engine.errors import ConfigError
from offbeat_engine.fsdp2.memory import sharding
from offbeat_engine.fsdp2.memory.offload import Offloadable, own_memory
from offbeat_engine.fsdp2.memory.updater import make_updater
from offbeat_engine.fsdp2.model import building as model
from offbeat_engine.fsdp2.model.replay import Routers
from offbeat_engine.toolkit.collectives import first_failure
from offbeat_engine.toolkit.step.throughput import ModelCost

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from offbeat_engine.fsdp2.config import Fsdp2Config
    from offbeat_engine.fsdp2.memory.updater import Updater
    from offbeat_engine.toolkit.world import SubGroup, World


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """A built engine: `weights` are all parameters with their gradients, `moments` the optimizer's state.

    `peers` are the ranks that share the tokens of the same sequences, None where each has its own.
    """

    scorer: model.Scorer
    routers: Routers
    updater: Updater
    peers: SubGroup | None
    sharded: bool
    gather_once: bool
    weights: Offloadable
    moments: Offloadable
    cost: ModelCost

    def reshard(self) -> None:
        """Let go of gathered weights: outside a step, parameters are always this rank's shards."""
        if not self.sharded:
            return
        from torch.distributed.fsdp import FSDPModule

        for module in self.scorer.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def build_state(config: Fsdp2Config, world: World) -> EngineState:
    """Build everything, and send to host memory what `config` wants there; a collective.

    Raises:
        ConfigError: the folder holds no model that fits the config.
    """
    scorer = _built_by_all(config, world)
    gather_once = sharding.gathers_once(scorer, config) or sharding.holds_all(scorer, config, world)
    cost = ModelCost.of(scorer.hf)
    own_memory(scorer)
    sharded = sharding.shard(scorer, config, world)
    named, num_replicas = dict(scorer.hf.named_parameters()), sharding.num_replicas(config, world)
    updater = make_updater(config.optimizer, named, world, num_replicas)

    def weights() -> Iterator[torch.Tensor]:
        for param in scorer.parameters():
            yield param
            if param.grad is not None:
                yield param.grad

    def moments() -> Iterator[torch.Tensor]:
        for of_weight in updater.moments().values():
            yield from of_weight.values()

    state = EngineState(
        scorer=scorer,
        routers=Routers(scorer.hf, config.compile),
        updater=updater,
        peers=sharding.peers_of(config, world),
        sharded=sharded,
        gather_once=gather_once,
        weights=Offloadable(weights),
        moments=Offloadable(moments),
        cost=cost,
    )
    state.weights.stay(in_host=config.offload_parameters)
    state.moments.stay(in_host=config.offload_optimizer)
    return state


def _built_by_all(config: Fsdp2Config, world: World) -> model.Scorer:
    """Build the model on every rank or raise on every rank: one alone would leave the others waiting."""
    if world.size > 1:
        world.ensure_group(config.collective_timeout_s)
    scorer, error = None, None
    try:
        scorer = model.build_scorer(config)
    except Exception as caught:  # noqa: BLE001 raised below, when all ranks know
        error = caught
    failure = first_failure(world, error)
    if error is not None:
        raise error
    if scorer is None or failure is not None:
        raise ConfigError(f"another rank could not build the model: {failure}")
    return scorer
