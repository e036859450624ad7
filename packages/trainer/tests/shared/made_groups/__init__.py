"""Scored groups as algorithms are given them, made in a line."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from offbeat_rollout import Completion, Finish
from offbeat_trainer.data.types import Group, Prompt, Score, Trajectory


def made_group(
    uid: str,
    rewards: Sequence[float],
    *,
    lengths: Sequence[int] | None = None,
    finishes: Sequence[Finish] | None = None,
    parts: Sequence[Mapping[str, float]] | None = None,
    data: Mapping[str, object] | None = None,
    greedy: float | None = None,
) -> Group:
    """Return a group whose completions earned `rewards`; completion i has i + 1 tokens unless `lengths` says otherwise."""
    count = len(rewards)
    lengths = range(1, count + 1) if lengths is None else lengths
    finishes = [Finish.STOP] * count if finishes is None else finishes
    parts = [dict[str, float]()] * count if parts is None else parts
    return Group(
        prompt=Prompt(uid=uid, text="", token_ids=(1, 2), data=data or {}),
        trajectories=tuple(
            Trajectory.of(
                Completion.of(
                    request_id=f"{uid}/{index}", token_ids=(3,) * length, logprobs=(-1.0,) * length, policy_versions=(1,) * length,
                    finish=finish,
                )
            )
            for index, (length, finish) in enumerate(zip(lengths, finishes, strict=True))
        ),
        scores=tuple(Score(reward=reward, parts=part) for reward, part in zip(rewards, parts, strict=True)),
        baseline=() if greedy is None else (Score(reward=greedy),),
    )  # fmt: skip


def caught(
    check: Callable[[Callable[..., Any]], None], function: Callable[..., Any], wrong: Callable[..., Any]
) -> bool:
    """Whether `check`, which holds for `function`, finds that `wrong` stands in its place."""
    check(function)
    try:
        check(partial(wrong, function))
    except AssertionError:
        return True
    return False


def _negated(function: Callable[..., Tensor], *given: object) -> Tensor:
    return -function(*given)


def _shifted(function: Callable[..., Tensor], *given: object) -> Tensor:
    return function(*given) + 1e-3


def _scaled(function: Callable[..., Tensor], *given: object) -> Tensor:
    return function(*given) * 1.001


PLANTED = {"sign": _negated, "shift": _shifted, "normaliser": _scaled}
"""Mistakes that the check of any estimate must catch."""
