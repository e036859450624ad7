"""The contract of tasks: what a run relies on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from offbeat_rollout import Completion, Finish
from offbeat_trainer import Score, Trajectory

if TYPE_CHECKING:
    from offbeat_recipes.tasks.base import RunnableTask
    from offbeat_trainer import Prompt

_STEPS = 3


def check_task(task: RunnableTask, num_prompts: int = 4) -> None:
    """Hold `task` to what a run relies on, with steps of `num_prompts` prompts.

    Raises:
        AssertionError: it breaks the contract; the text says where.
    """
    steps = [task.prompts(step, num_prompts) for step in range(_STEPS)]
    held_out = task.validation_prompts(num_prompts)
    assert steps == [task.prompts(step, num_prompts) for step in range(_STEPS)], (
        "prompts of a step must be the same ones whenever asked again: a resumed run meets them again"
    )
    assert held_out == task.validation_prompts(num_prompts), "held-out prompts must always be the same"
    for step, prompts in enumerate(steps):
        uids = {prompt.uid for prompt in prompts}
        assert len(uids) == len(prompts) == num_prompts, (
            f"step {step}: {num_prompts} prompts were asked for, got {len(prompts)} of {len(uids)} uids"
        )
        shared = uids & {prompt.uid for prompt in held_out}
        assert not shared, f"training meets what is held out: {sorted(shared)}"
    vocabulary = len(task.tokenizer)
    for prompt in (*held_out, *(one for prompts in steps for one in prompts)):
        _check_tokens(prompt, task.max_prompt_tokens, vocabulary)
    stops = task.stop_token_ids()
    assert stops, "no token ends a completion: each would go on to sampling.max_tokens"
    assert all(0 <= stop < vocabulary for stop in stops), (
        f"stop tokens {stops} of a vocabulary of {vocabulary}"
    )
    if hasattr(task, "score"):
        _check_score(task, steps[0][0], stops[0])


def _check_tokens(prompt: Prompt, most: int, vocabulary: int) -> None:
    assert 0 < len(prompt.token_ids) <= most, (
        f"prompt {prompt.uid} has {len(prompt.token_ids)} tokens; it must have 1 to max_prompt_tokens, {most}"
    )
    assert all(0 <= token < vocabulary for token in prompt.token_ids), (
        f"prompt {prompt.uid} has tokens outside the vocabulary of {vocabulary}"
    )


def _check_score(task: RunnableTask, prompt: Prompt, stop: int) -> None:
    empty = Trajectory.of(
        Completion.of(
            request_id="empty", token_ids=(stop,), logprobs=(-1.0,), policy_versions=(1,), finish=Finish.STOP
        )
    )
    found, again = (task.score(prompt, empty) for _ in range(2))  # type: ignore[attr-defined]
    assert isinstance(found, Score), f"`score` must return a Score, got {found!r:.80}"
    assert math.isfinite(found.reward), f"a reward must be finite, got {found.reward}"
    assert found == again, f"the same completion is worth {found.reward} and then {again.reward}"
