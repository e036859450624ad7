"""Whether the rows that are learned from fit the model: the longest of them, looked at before anything starts."""

# transformers is typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat_engine.capabilities import Refusal
from offbeat_recipes.tasks.text import TextTask
from offbeat_trainer.algorithms.registry import algorithm_class

if TYPE_CHECKING:
    from collections.abc import Iterator

    from offbeat_recipes.settings.tree import RunConfig
    from offbeat_recipes.tasks.base import RunnableTask


def length_refusals(
    config: RunConfig, task: RunnableTask, *, supervised_alone: bool = False
) -> Iterator[Refusal]:
    """Refuse written rows, prompt and what is learned from it, that are longer than the model takes or `rollout.max_model_len` says.

    Tasks of other packages are not looked through. `supervised_alone`: nothing but supervised training is done.
    """
    if not isinstance(task, TextTask):
        return
    held_out = config.trainer.validation_prompts
    task.validation_prompts(min(held_out, 1))  # raises where no file holds any
    looked = []
    if config.warmup.steps:
        looked.append(task.longest_row("examples", held_out if supervised_alone else 0))
    if not (config.generates or supervised_alone):
        reads = str(getattr(algorithm_class(config.algorithm.name), "reads", ""))
        looked.append(task.longest_row(reads, held_out))
    positions, said = _positions(config), config.rollout.max_model_len
    for longest, where in sorted(looked)[-1:]:
        told = f"{where} has {longest} tokens, prompt and completion"
        if positions and longest > positions:
            yield Refusal(
                "task", f"{told}, and the model was made for {positions} positions", "leave it out, or cut it"
            )
        elif longest > said:
            yield Refusal(
                "rollout.max_model_len",
                f"{told}, more than {said}",
                f"rollout.max_model_len={longest}, or leave the row out",
            )


def _positions(config: RunConfig) -> int:
    """Return how many positions the model was made for; 0: it does not say."""
    from transformers import AutoConfig

    shape = AutoConfig.from_pretrained(
        config.model.path, local_files_only=True, trust_remote_code=config.model.trust_remote_code
    )
    return int(getattr(shape.get_text_config(), "max_position_embeddings", 0))
