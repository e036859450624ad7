"""A trial of an algorithm on made-up groups: what is missing is found before anything starts."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

from offbeat_rollout import Completion, Finish
from offbeat_trainer.data.assemble import assemble
from offbeat_trainer.data.types import Group, Prompt, Score, Trajectory
from offbeat_trainer.errors import PlanRefused

if TYPE_CHECKING:
    from offbeat_trainer.algorithms.interface import Algorithm
    from offbeat_trainer.config import AlgorithmConfig

_TOKENS = 3


def trial(algorithm: Algorithm[AlgorithmConfig]) -> None:
    """Send `algorithm` through pickle, ask it for the targets of two groups, and make a batch of them.

    Raises:
        PlanRefused: it does not come out as it went in.
        Exception: what it raises, or what is wrong with its targets.
    """
    if pickle.loads(pickle.dumps(algorithm)) != algorithm:
        raise PlanRefused("it comes out of pickle as another; ranks would not learn what the driver asks for")
    if algorithm.Config.written_rows:
        return  # it makes batches of a task's rows, and these are not known here
    groups = [_group(uid, algorithm.step.group_size) for uid in ("one", "other")]
    assemble(groups, algorithm.targets(groups), temperature=1.0)


def _group(uid: str, size: int) -> Group:
    """Return completions of 1, 2, 3, 1, ... tokens, of which every second is right."""
    return Group(
        prompt=Prompt(uid=uid, text="1+1=", token_ids=(1, 2)),
        trajectories=tuple(
            Trajectory.of(
                Completion.of(
                    request_id=f"{uid}/{index}",
                    token_ids=[3] * (1 + index % _TOKENS),
                    logprobs=[-1.0] * (1 + index % _TOKENS),
                    policy_versions=[1] * (1 + index % _TOKENS),
                    finish=Finish.STOP,
                )
            )
            for index in range(size)
        ),
        scores=tuple(Score(reward=index % 2, correct=index % 2 == 1) for index in range(size)),
    )
