"""Cases of experts that come with the batch: replayed as they are, or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat_engine.capabilities import Feature
from offbeat_engine.config import Dtype
from offbeat_engine.errors import BatchError
from offbeat_engine.testing import probes
from offbeat_engine.testing.cases_features import compare_bfloat16
from offbeat_engine.testing.cases_training import check_agreement, check_training
from offbeat_engine.testing.models import FAMILIES
from offbeat_engine.testing.reference import Setup, reference_run
from offbeat_engine.testing.routing import with_drawn_experts
from offbeat_engine.testing.runner import BATCHES, KEPT, Case

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from offbeat_engine.batch import TrainBatch
    from offbeat_engine.testing.probes import Job
    from offbeat_engine.testing.runner import Options, Runner
    from offbeat_engine.world import World


def cases(options: Options) -> Iterator[Case]:
    """Yield a case for each mixture; an engine that does not declare the feature must refuse the key."""
    mixtures = [name for name in options.families if not FAMILIES[name].dense]
    num_ranks = options.fit(2)
    for family in mixtures:
        yield Case(
            name=f"routed_experts_{family}",
            check=partial(_replayed, family=family, num_ranks=num_ranks),
            features=frozenset({Feature.ROUTED_EXPERTS}),
            num_ranks=num_ranks,
            deep=family != mixtures[0],
        )
        yield Case(
            name=f"routed_experts_bfloat16_{family}",
            check=partial(_replayed_bfloat16, family=family, num_ranks=num_ranks),
            features=frozenset({Feature.ROUTED_EXPERTS, Feature.BFLOAT16}),
            num_ranks=num_ranks,
            deep=family != mixtures[0],
        )
    check = partial(_refused, family=options.families[0], num_ranks=num_ranks)
    yield Case(name="routed_experts_refused", check=check, num_ranks=num_ranks)


def _replayed(runner: Runner, family: str, num_ranks: int) -> None:
    check_replay(runner, runner.job(family), num_ranks)


def check_replay(runner: Runner, job: Job, num_ranks: int) -> None:
    """Train a mixture on experts that were drawn, beside a plain model whose routers are made to take the same.

    Raises:
        AssertionError: predictions, gradients or weights differ, or are those of the routers' own choice.
    """
    batches = _drawn(job)
    setup = Setup(path=job.config.model.path, optimizer=job.config.optimizer)
    expected = reference_run(setup, batches, job.loss_fn, KEPT)
    records = runner.run(probes.train, num_ranks, job, batches, KEPT)
    check_training(runner, records[0], expected)
    check_agreement(records)
    given: torch.Tensor = expected.predictions["logprobs"]
    own: torch.Tensor = runner.reference(job).predictions["logprobs"]
    apart = float((given - own).abs().max())
    assert apart > 100 * runner.tolerances.logprob, (
        "the drawn experts answer as the chosen ones do; draw others"
    )


def _drawn(job: Job, *, for_all: bool = False) -> list[TrainBatch]:
    config = json.loads((Path(job.config.model.path) / "config.json").read_text())
    shape = {
        "num_layers": config["num_hidden_layers"],
        "num_experts": config.get("num_experts", config.get("num_local_experts")),
        "top_k": config["num_experts_per_tok"],
    }
    return [with_drawn_experts(batch, **shape, for_all=for_all) for batch in BATCHES]


def _replayed_bfloat16(runner: Runner, family: str, num_ranks: int) -> None:
    """With the same experts, a mixture strays from float32 hardly more in bfloat16 than a plain model of it does."""
    job = runner.job(family, dtype=Dtype.BFLOAT16)
    batches = _drawn(job, for_all=True)  # rounding decides between near ties of a router's own choice
    setup = Setup(path=job.config.model.path, optimizer=job.config.optimizer)
    exact, plain = (
        reference_run(replace(setup, bfloat16=low), batches, job.loss_fn, KEPT) for low in (False, True)
    )
    compare_bfloat16(runner, runner.run(probes.train, num_ranks, job, batches, KEPT)[0], exact, plain)


def _refused(runner: Runner, family: str, num_ranks: int) -> None:
    """What an engine cannot replay, or a dense model has no use for, is refused on all ranks, and not left aside."""
    if Feature.ROUTED_EXPERTS in runner.features and not FAMILIES[family].dense:
        return
    batch = with_drawn_experts(BATCHES[0], 2, 4, 2)
    for said in runner.run(_what_it_says, num_ranks, runner.job(family), batch):
        if "routed_experts" not in said:
            raise AssertionError(f"a batch with `routed_experts` should be refused by name, got {said!r}")


def _what_it_says(world: World, job: Job, batch: TrainBatch) -> str:
    with probes.running(world, job) as engine, engine.eval_mode():
        try:
            engine.forward_backward_step(engine.shard_data(batch), forward_only=True)
        except BatchError as error:
            return str(error)
    return ""
