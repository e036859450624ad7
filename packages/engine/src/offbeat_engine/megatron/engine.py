"""`MegatronEngine`: the training-engine interface over megatron-core.

The training state of this rank as pieces that any layout of ranks, and any engine, reads; see `toolkit.state.training_state`.

A rank's share of master weights and moments is a run of numbers of a flattened weight, which any cut comes to as boxes (`blocks`).
So each rank writes and reads its own, and nothing is gathered. A frozen weight has no master: it is there in what the engine
computes in.
"""

# megatron-core is untyped, and torch's optimizers keep an untyped dictionary.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from offbeat_engine.base import EngineBase
from offbeat_engine.batch import WeightShard
from offbeat_engine.config import require_config
from offbeat_engine.errors import CheckpointError, ConfigError
from offbeat_engine.megatron import checks
from offbeat_engine.megatron.build import Parts, build_parts
from offbeat_engine.megatron.config import MegatronConfig
from offbeat_engine.megatron.families import parts_of
from offbeat_engine.megatron.layers import transformer_engine
from offbeat_engine.megatron.self_check import Reference, find_difference, reference_of
from offbeat_engine.megatron.stepping import Step, run_step
from offbeat_engine.megatron.updater import Updater, gradient
from offbeat_engine.toolkit.collectives import compute_device, compute_dtype, first_failure
from offbeat_engine.toolkit.devices import device_refusals
from offbeat_engine.toolkit.hf.weight_files import copy_beside, export_folder, named_files, write_files
from offbeat_engine.toolkit.state import training_state
from offbeat_engine.toolkit.state.slices import Region, check_fit
from offbeat_engine.toolkit.state.training_state import EXP_AVG, EXP_AVG_SQ, WEIGHT, Saved
from offbeat_engine.toolkit.step.throughput import peak_flops

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from contextlib import AbstractContextManager

    from offbeat_engine.batch import Predictions, StepContext, TrainBatch, WeightSpec
    from offbeat_engine.config import Capabilities, EngineConfig, Refusal
    from offbeat_engine.megatron.loading import Held
    from offbeat_engine.megatron.updater import Share
    from offbeat_engine.toolkit.state.saves import Destination, SaveHandle, Saves
    from offbeat_engine.toolkit.state.training_state import Loaded
    from offbeat_engine.toolkit.step.micro_batches import StepRequest
    from offbeat_engine.toolkit.world import World


_MOMENTS = {"exp_avg": EXP_AVG, "exp_avg_sq": EXP_AVG_SQ}


def save(saves: Saves, held: Sequence[Held], updater: Updater, where: Destination, block: bool) -> SaveHandle:
    """See `training_state.save`."""
    meta = {
        "step": where.global_step,
        "scheduled_steps": updater.num_steps,
        "optimizer": updater.rule_name,
        "base": {},
        "adapters": {},
    }
    saved = Saved(pieces=lambda: _pieces(saves, held, updater), steps=_steps(held, updater), meta=meta)
    return training_state.save(saves, saved, where, block)


def _pieces(saves: Saves, held: Sequence[Held], updater: Updater) -> Iterator[WeightShard]:
    for one in held:
        share = updater.share(one.param)
        if not one.param.requires_grad:
            for block in one.blocks if one.speaks else ():
                tensor = block.of(one.param.detach()).float()
                yield WeightShard(
                    name=WEIGHT + block.name, shape=block.shape, offsets=block.offsets, tensor=tensor
                )
            continue
        if share is None or not _writes(one, share):
            continue
        runs = {
            WEIGHT: share.master,
            **{kind: share.state[key] for key, kind in _MOMENTS.items() if share.state},
        }
        for part in parts_of(one.blocks, tuple(one.param.shape), share.start, share.stop):
            for kind, run in runs.items():
                yield WeightShard(
                    name=kind + part.block.name,
                    shape=part.block.shape,
                    offsets=part.region.offsets,
                    tensor=part.of(run.detach().view(-1)),
                )
    yield from training_state.pieces(saves.world)


def _writes(one: Held, share: Share) -> bool:
    """Whether this rank's run is one to write: where copies share them out, each writes its own run."""
    return one.alone if share.shared_out else one.speaks


def _steps(held: Sequence[Held], updater: Updater) -> dict[str, float]:
    """Return the updates that this rank's weights have seen."""
    steps: dict[str, float] = {}
    for one in held:
        share = updater.share(one.param)
        if share is not None and share.state:
            steps |= dict.fromkeys((block.name for block in one.blocks), float(share.state["step"]))
    return steps


def load(saves: Saves, parts: Parts, updater: Updater, folder: Path, verified: bool) -> None:
    """Load `folder` in place, whatever layout of ranks, or other engine, has written it; see `training_state.load`."""
    held, known = parts.held, {WEIGHT + name for name in parts.leaving.shapes}

    def check(loaded: Loaded) -> None:
        there = loaded.meta.get("optimizer")
        if loaded.steps and there != updater.rule_name:
            raise CheckpointError(
                f"{folder} holds what the optimizer `{there}` has gathered, and this engine has `{updater.rule_name}`; set "
                "`optimizer.name` back, or train on from the exported weights"
            )
        if loaded.meta.get("adapters"):
            raise CheckpointError(
                f"{folder} holds adapters, and this engine has none; use the engine `fsdp2`"
            )
        training_state.check_no_more(loaded.index, known, str(folder))
        for one in held:
            kinds = [WEIGHT, *(_MOMENTS.values() if _seen(one, updater, loaded, folder) else ())]
            wanted = {
                kind + block.name: (block.shape, torch.float32) for block in one.blocks for kind in kinds
            }
            check_fit(loaded.index, wanted, str(folder))

    def read(loaded: Loaded) -> None:
        for one in held:
            for block in one.blocks:
                region = Region(block.offsets, block.sizes)
                loaded.reader.fill(WEIGHT + block.name, region, block.of(one.param.detach()))
            share = updater.share(one.param)
            if share is not None:
                _read_run(one, share, loaded, _seen(one, updater, loaded, folder))
        states = training_state.read(saves.world, loaded)
        updater.set_num_steps(loaded.meta["scheduled_steps"])
        training_state.restore(saves.world, states)

    training_state.load(saves, folder, verified, check, read)


def _seen(one: Held, updater: Updater, loaded: Loaded, folder: Path) -> float:
    """Return how many updates the moments of a weight have seen; 0 where it is not trained, or there are none."""
    if updater.share(one.param) is None or not loaded.steps or not one.blocks:
        return 0.0
    seen = {loaded.steps.get(block.name) for block in one.blocks}
    step = next(iter(seen))
    if len(seen) != 1 or step is None:
        raise CheckpointError(
            f"{folder} should say how many updates `{one.blocks[0].name}` has seen, got {sorted(map(str, seen))}; "
            "it was frozen there, or its parts were not stepped together"
        )
    return step


def _read_run(one: Held, share: Share, loaded: Loaded, seen: float) -> None:
    """Read master weights, where they are not the weights themselves, and what the optimizer has gathered in `seen` updates."""
    count = share.stop - share.start
    fresh = {key: torch.zeros(count, device=one.param.device) for key in _MOMENTS if seen}
    runs = {_MOMENTS[key]: run for key, run in fresh.items()}
    if share.is_apart:
        runs[WEIGHT] = share.master.detach().view(-1)
    for part in parts_of(one.blocks, tuple(one.param.shape), share.start, share.stop):
        for kind, run in runs.items():
            loaded.reader.fill(kind + part.block.name, part.region, part.of(run))
    share.state.clear()
    if seen:
        share.state["step"] = torch.tensor(seen)
        share.state.update({key: run.view(share.master.shape) for key, run in fresh.items()})


class MegatronEngine(EngineBase[Parts]):
    """Hugging Face causal models on megatron-core's local layers, gloo on CPU and NCCL on GPU.

    Of `num_ranks` ranks neighbours share a tensor, then come the copies, and the stages of a pipeline lie furthest apart
    (megatron-core's own order). Outputs are on the last stage, whose first rank of a tensor leads.
    """

    Config = MegatronConfig

    def __init__(self, config: EngineConfig, world: World) -> None:
        super().__init__(config, world)
        self._config = require_config(config, MegatronConfig)

    @classmethod
    def capabilities(cls) -> Capabilities:  # noqa: D102
        return checks.capabilities()

    @classmethod
    def check(cls, config: EngineConfig, num_ranks: int) -> list[Refusal]:  # noqa: D102
        return checks.refusals(require_config(config, MegatronConfig), num_ranks)

    @property
    def _neighbours(self) -> int:
        return self._config.tensor_parallel_size * self._config.context_parallel_size

    @property
    def data_rank(self) -> int:  # noqa: D102
        return self.world.rank // self._neighbours % self.data_size

    @property
    def is_leader(self) -> bool:  # noqa: D102
        stage = self.world.rank // (self._neighbours * self.data_size)
        last = stage == self._config.pipeline_parallel_size - 1
        return last and self.world.rank % self._neighbours == 0

    def init_model(self) -> None:
        """Build, fill and prepare everything.

        Raises:
            ConfigError: `check` refuses the config, or the folder holds no model that fits it.
            StateError: called twice, or other ranks exist and `World.join` was not called.
        """
        self._check_new()
        if self.world.size > 1:
            self.world.ensure_group(self._config.collective_timeout_s)
        refusals = self.check(self._config, self.world.size)
        refusals = refusals or device_refusals(self._config, self.world)
        refusals = refusals or transformer_engine.refusals_here(self._config, self.world)
        refused = "; ".join(map(str, refusals))
        error = ConfigError(refused) if refused else None
        failure = first_failure(self.world, error)
        if failure is not None:
            raise error or ConfigError(f"another rank refuses the settings: {failure}")
        # Reading a large model layer by layer may outlast the deadline of other calls.
        reference = reference_of(self._config, compute_device(self.world), self._saves.world)
        self._state = build_parts(self._config, self.world)
        difference = self._difference(self._state, reference)
        if difference is not None:
            self.close()
            raise ConfigError(difference)

    def _difference(self, parts: Parts, reference: Reference) -> str | None:
        """Return why this model must not be used here (see `self_check`), the same on all ranks, or None."""
        bits = transformer_engine.without_eight_bits(parts.chunks[0].model.config)
        with self.eval_mode(), bits:
            step = self._step(self._request())
            return find_difference(step, parts, self._saves.world, reference)

    def _updates(self) -> Updater:
        updater = self._ready().updater
        if updater is None:
            self._check_trained()
        assert updater is not None
        return updater

    def _check_mode(self, forward_only: bool) -> None:
        super()._check_mode(forward_only)
        if not forward_only:
            self._updates().begin_call()

    def _set_training(self, training: bool) -> None:
        for chunk in self._ready().chunks:
            chunk.wrapped.train(training)

    def _borrowed(self) -> AbstractContextManager[None]:
        return self._ready().groups.lent()

    def _run(self, request: StepRequest, batch: TrainBatch, ctx: StepContext) -> Predictions:
        return run_step(self._step(request), batch, ctx)

    def _step(self, request: StepRequest) -> Step:
        parts, peak = self._ready(), peak_flops(request.device, compute_dtype(self._config))
        return Step(
            request=replace(
                request, cost=parts.cost, peak_flops=peak, replays_experts=True, vocab_size=parts.shape.vocab
            ),
            config=self._config,
            chunks=parts.chunks,
            shape=parts.shape,
            groups=parts.groups,
            sequence_limit=parts.sequence_limit,
        )

    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:  # noqa: D102
        if device != self.world.device:
            raise ConfigError(f"the Megatron engine stays on {self.world.device!r}; got {device!r}")

    def _save(self, where: Destination, block: bool) -> SaveHandle:
        return save(self._saves, self._ready().held, self._updates(), where, block)

    def _load(self, folder: Path, verified: bool) -> None:
        load(self._saves, self._ready(), self._updates(), folder, verified)

    def export_huggingface(self, path: str) -> None:  # noqa: D102
        parts, dtype = self._ready(), compute_dtype(self._config)
        self._saves.finish_last()
        named = parts.leaving.whole(dtype, {0}, _itself)
        # Flushing tens of gigabytes may outlast the deadline of other calls.
        world, specs = self._saves.world, parts.leaving.specs(dtype)
        origin = Path(self._config.model.path)

        def write(folder: Path | None) -> None:
            write_files(folder, named_files(specs), specs, named)
            if folder is not None:
                config = json.loads((origin / "config.json").read_text())
                config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix(
                    "torch."
                )
                (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
                copy_beside(folder, origin)

        export_folder(world, Path(path), origin, write)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight, one whole tensor at a time, in memory of its own."""
        for name, tensor in self.named_weights_on(range(self.world.size)):
            assert tensor is not None
            yield name, tensor

    def named_weights_on(self, ranks: Collection[int]) -> Iterator[tuple[str, torch.Tensor | None]]:  # noqa: D102
        return self._ready().leaving.whole(compute_dtype(self._config), ranks, _itself)

    def weight_manifest(self) -> tuple[WeightSpec, ...]:  # noqa: D102
        return self._ready().leaving.specs(compute_dtype(self._config))

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:  # noqa: D102
        self._accumulation.check_gradients()
        parts = self._ready()
        with self._borrowed():
            self._updates().bring_together(everywhere=True)
        every = range(self.world.size)
        for name, tensor in parts.leaving.whole(torch.float32, every, gradient, names=parts.trained):
            assert tensor is not None
            yield name, tensor


def _itself(param: torch.nn.Parameter) -> torch.Tensor:
    return param
