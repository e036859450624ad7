"""Tokens that end a completion, held against the model's vocabulary: vLLM refuses a strange one in mid-run only."""

# transformers is typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat_engine.capabilities import Refusal
from offbeat_recipes.errors import TaskError
from offbeat_recipes.tasks.config import RowsConfig
from offbeat_rollout.checks import eos_token_ids

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from offbeat_recipes.settings.tree import RunConfig
    from offbeat_recipes.tasks.base import RunnableTask


def stop_refusals(config: RunConfig, vocab_size: int) -> Iterator[Refusal]:
    """Refuse what files of the model folder name as end tokens outside the `vocab_size` tokens of the model.

    A task that makes its model is right by construction; one of another package is asked by `check_stops`.

    Raises:
        TaskError: the task needs the folder's tokenizer, and there is none.
    """
    folder = config.model.path
    if not folder:
        return
    ends = list(eos_token_ids(folder))
    if isinstance(config.task, RowsConfig):
        from offbeat_recipes.tasks.text import PromptMaker

        ends += PromptMaker(folder, config.task.chat_template).stop_token_ids()
    strange = outside(ends, vocab_size)
    if strange:
        yield Refusal(
            "model.path",
            f"{folder} ends completions at {_named(strange)}, outside the model's vocabulary of {vocab_size}",
            "correct eos_token_id in its generation_config.json, config.json and tokenizer",
        )


def check_stops(task: RunnableTask, model_folder: Path, *, trust_remote_code: bool) -> None:
    """Hold the stop tokens of a task that is made against the model it is for.

    Raises:
        TaskError: one is outside the model's vocabulary.
    """
    from transformers import AutoConfig

    shape = AutoConfig.from_pretrained(
        model_folder, local_files_only=True, trust_remote_code=trust_remote_code
    )
    vocab_size = int(shape.get_text_config().vocab_size)
    strange = outside(task.stop_token_ids(), vocab_size)
    if strange:
        raise TaskError(
            f"task: completions end at {_named(strange)}, outside the model's vocabulary of {vocab_size}; "
            "make the task's tokenizer and model.path agree"
        )


def outside(token_ids: Iterable[int], vocab_size: int) -> list[int]:
    """Return those of `token_ids` that are no token of a vocabulary of `vocab_size`, each once, ascending."""
    return sorted({token for token in token_ids if not 0 <= token < vocab_size})


def _named(token_ids: list[int]) -> str:
    return f"token{'s' if len(token_ids) > 1 else ''} {', '.join(map(str, token_ids))}"
