"""What a run needs of a task, and how a task is found by its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from offbeat_recipes.errors import TaskError
from offbeat_recipes.tasks.registry import task_class
from offbeat_trainer import Supervised, Task
from offbeat_trainer.rollouts.scorer import TaskScorer

if TYPE_CHECKING:
    from collections.abc import Hashable
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from offbeat_recipes.tasks.config import TaskConfig
    from offbeat_trainer import Example, Prompt, Score, Scorer, Trajectory
    from offbeat_trainer.config import RewardConfig


class RunnableTask(Task, Supervised, Protocol):
    """A task with everything a run asks of it, and either `score` or `scorer`: see `ScoresItself` and `MakesScorer`.

    `max_prompt_tokens` bounds every prompt it hands out. `notes` are sentences for the person who starts the run
    (say, how many overlong prompts were left out). `Config`, a subclass of `TaskConfig`, has the settings of the class, if any. What the
    plan shows where it is there: `num_train_prompts`, different ones, and `max_answer_tokens`, those of the longest right answer.
    """

    max_prompt_tokens: int
    notes: tuple[str, ...]

    def __init__(
        self,
        config: Any,  # noqa: ANN401 of the task's own class
        model_path: str,
        seed: int,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        """See `make_task`."""
        ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that prompts were made with; the model's own."""
        ...

    def model_folder(self, cache_dir: Path, seed: int) -> Path:
        """Return a local Hugging Face folder of the model to start from; made in `cache_dir` where the task does.

        Two calls with one seed give the same weights.
        """
        ...


def make_task(
    config: TaskConfig, model_path: str, seed: int, *, trust_remote_code: bool = False
) -> RunnableTask:
    """Return the task that `config` describes, its data read and checked.

    Args:
        config: the section `task` of a run.
        model_path: the model's folder, for tasks that use its tokenizer; "" where the task makes a model.
        seed: decides the order of prompts.
        trust_remote_code: whether code in the model's folder may run, for its tokenizer.

    Raises:
        TaskError: it cannot be made; data errors name file, row and key.
    """
    made = task_class(config.name)(config, model_path, seed, trust_remote_code=trust_remote_code)
    return cast("RunnableTask", made)


class ScoresItself(Protocol):
    """A task whose reward is a quick function of its own."""

    def score(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """Return what `trajectory` is worth; 0 for a wrong one, never for a failure."""
        ...


@runtime_checkable
class MakesScorer(Protocol):
    """A task whose completions are scored by something else."""

    def scorer(self, config: RewardConfig, log: Path) -> Scorer:
        """Return what scores completions; what that prints goes to `log`."""
        ...


@runtime_checkable
class Votes(Protocol):
    """A task that finds the answer in a completion, for a majority of samples; without it the whole text is the answer."""

    def vote(self, text: str) -> Hashable:
        """Return the answer that `text` gives; None where it gives none, which is no vote."""
        ...


@runtime_checkable
class HoldsOutExamples(Protocol):
    """A task with worked examples that training never meets."""

    def validation_examples(self, num_examples: int) -> list[Example]:
        """Return up to `num_examples` of them, always the same."""
        ...


def make_scorer(task: RunnableTask, config: RewardConfig, log: Path) -> Scorer:
    """Return what scores the completions of `task`: its `scorer`, or its own `score`, see the protocols above.

    Raises:
        TaskError: it has nothing that says what a completion is worth.
    """
    if isinstance(task, MakesScorer):
        return task.scorer(config, log)
    if not hasattr(task, "score"):
        raise TaskError(
            f"task: {type(task).__name__} says nowhere what a completion is worth (`score` or `scorer`)"
        )
    return TaskScorer(cast("ScoresItself", task).score, config)
