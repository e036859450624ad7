"""Scored groups as algorithms are given them, made in a line."""

from offbeat_rollout import Completion, Finish
from offbeat_trainer.data.types import Group, Prompt, Score, Trajectory


def made_group(uid, rewards, *, lengths=None, finishes=None, parts=None, data=None, greedy=None):
    """Return a group whose completions earned `rewards`; completion i has i + 1 tokens unless `lengths` says otherwise."""
    count = len(rewards)
    lengths = range(1, count + 1) if lengths is None else lengths
    finishes = [Finish.STOP] * count if finishes is None else finishes
    parts = [{}] * count if parts is None else parts
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


def caught(check, function, wrong):
    """Whether `check`, which holds for `function`, finds that `wrong` stands in its place."""
    check(function)
    try:
        check(lambda *given: wrong(function, *given))
    except AssertionError:
        return True
    return False


PLANTED = {
    "sign": lambda function, *given: -function(*given),
    "shift": lambda function, *given: function(*given) + 1e-3,
    "normaliser": lambda function, *given: function(*given) * 1.001,
}
"""Mistakes that the check of any estimate must catch."""
