"""Cases of models that are only asked: a reference of its own, and the base under the adapters of a policy."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from offbeat_engine.capabilities import Feature
from offbeat_engine.config import Dtype, LoraConfig
from offbeat_engine.testing import probes
from offbeat_engine.testing.compare import check_tokens
from offbeat_engine.testing.runner import BATCHES, Case

if TYPE_CHECKING:
    from collections.abc import Iterator

    from offbeat_engine.interface import Predictions
    from offbeat_engine.testing.runner import Options, Runner

_LORA = LoraConfig(rank=4, alpha=8.0)


def cases(options: Options) -> Iterator[Case]:
    """Yield the cases of this file."""
    alone = frozenset({Feature.INFERENCE_ONLY})
    first = options.families[0]
    for family in options.families:
        check = partial(_inference_only, family=family, dtype=Dtype.FLOAT32, num_ranks=options.fit(2))
        name, again = f"inference_only_{family}", family != first
        yield Case(name=name, check=check, features=alone, num_ranks=options.fit(2), deep=again)
    for num_ranks in (1, 2):
        check = partial(_inference_only, family=first, dtype=Dtype.BFLOAT16, num_ranks=num_ranks)
        both = alone | {Feature.BFLOAT16}
        yield Case(
            name=f"inference_only_bfloat16_{num_ranks}", check=check, features=both, num_ranks=num_ranks
        )
    for num_ranks in (1, 2):
        check = partial(_base, family=first, num_ranks=num_ranks)
        yield Case(
            name=f"lora_base_{num_ranks}",
            check=check,
            features=frozenset({Feature.LORA}),
            num_ranks=num_ranks,
        )


def _inference_only(runner: Runner, family: str, dtype: Dtype, num_ranks: int) -> None:
    """It answers as the engine that could be trained does, bit for bit, and does not let itself be trained."""
    alone = runner.job(family, dtype=dtype, inference_only=True)
    got: Predictions = runner.run(probes.score, num_ranks, alone, BATCHES[0])[0]
    expected: Predictions = runner.run(probes.score, num_ranks, runner.job(family, dtype=dtype), BATCHES[0])[
        0
    ]
    check_tokens("inference only", got, expected, BATCHES[0], 0.0)
    if not runner.run(probes.refuse_training, num_ranks, alone)[0]:
        raise AssertionError("`train_mode` of an engine that is `inference_only` should raise StateError")


def _base(runner: Runner, family: str, num_ranks: int) -> None:
    """Without its adapters a trained policy is the model it began with, and with them again what it was before."""
    batch, limit = BATCHES[0], runner.tolerances.logprob
    job = runner.job(family, lora=_LORA)
    trained, base, again = runner.run(probes.score_base, num_ranks, job, BATCHES, batch)[0]
    expected: Predictions = runner.run(probes.score, num_ranks, runner.job(family), batch)[0]
    check_tokens("the base of a policy with adapters", base, expected, batch, limit)
    check_tokens("the policy after its base was asked", again, trained, batch, 0.0)
    if float((trained["logprobs"] - base["logprobs"]).abs().max()) < 10 * limit:
        raise AssertionError("five steps should move the log-probs away from those of the base")
