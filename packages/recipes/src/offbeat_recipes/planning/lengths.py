"""Whether the rows that are learned from fit the model: the longest of them, looked at before anything starts."""

# transformers is typed in part; tokenizers are called here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from offbeat_engine.config import Refusal
from offbeat_recipes.errors import TaskError
from offbeat_recipes.planning.algorithm import algorithm_of
from offbeat_recipes.tasks.base import make_task
from offbeat_recipes.tasks.config import CharTaskConfig, RowsConfig
from offbeat_recipes.tasks.text import TextTask
from offbeat_rollout.interface import eos_token_ids
from offbeat_trainer.algorithms.registry import algorithm_class

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from transformers import PretrainedConfig

    from offbeat_recipes.settings.tree import RunConfig
    from offbeat_recipes.tasks.base import RunnableTask

_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def shape_of(folder: str | Path, *, trust_remote_code: bool) -> PretrainedConfig:
    """Return what the config.json of the model in `folder` says."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)


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
    shape = shape_of(config.model.path, trust_remote_code=config.model.trust_remote_code)
    return int(getattr(shape.get_text_config(), "max_position_embeddings", 0))


def token_refusals(config: RunConfig) -> list[Refusal]:
    """Refuse models of other roles to which a number is another token than to the policy."""
    told = [(name, spec.path) for name, spec in algorithm_of(config).roles().items() if spec.path]
    found = [(name, path, _other_tokens(config, path)) for name, path in told]
    return [
        Refusal("algorithm", f"its {name}, {path}: {lack}", "name a model of the same tokens")
        for name, path, lack in found
        if lack
    ]


def _other_tokens(config: RunConfig, path: str) -> str:
    """Say how the tokens of the model in `path` differ from the policy's, or nothing: one number must be one token to both."""
    if not any((Path(path) / name).is_file() for name in _TOKENIZERS):
        return ""  # a folder of weights alone: nothing is known of its tokens
    ours, theirs = _policy_tokens(config), _tokens_of(path, config)
    if ours is None or ours == theirs:
        return ""
    differ = sorted(token for token in ours if theirs.get(token) != ours[token])
    if not differ:
        return f"its tokenizer has {len(theirs) - len(ours)} tokens more than the policy's"
    return f"{len(differ)} of the policy's {len(ours)} tokens are others there, {differ[0]!r} for one"


def _policy_tokens(config: RunConfig) -> dict[str, int] | None:
    """Return the policy's vocabulary; None where a task of another package makes the model."""
    if config.model.path:
        return _tokens_of(config.model.path, config)
    if isinstance(config.task, CharTaskConfig):
        return dict(make_task(config.task, "", config.seed).tokenizer.get_vocab())
    return None


def _tokens_of(path: str, config: RunConfig) -> dict[str, int]:
    from transformers import AutoTokenizer

    return dict(
        AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=config.model.trust_remote_code
        ).get_vocab()
    )


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

        ends += PromptMaker(
            folder, config.task.chat_template, trust_remote_code=config.model.trust_remote_code
        ).stop_token_ids()
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
    shape = shape_of(model_folder, trust_remote_code=trust_remote_code)
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
