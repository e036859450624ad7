"""The settings of the tasks, one class each."""

# No `from __future__ import annotations` here: pydantic reads these annotations at run time.
from dataclasses import dataclass, field, replace
from math import lcm
from typing import Literal, Self, TypeAlias

from offbeat_engine.config import bounded

USUAL_HEADS, HEAD_DIM = 3, 32
HUB_ROWS = "hf://datasets/"
"""What the name of a file of rows on the Hugging Face hub begins with."""
RowFiles: TypeAlias = Literal["train_path", "validation_path"]
ROW_FILES: tuple[RowFiles, ...] = ("train_path", "validation_path")
"""The settings that name files of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    """The settings of a task; one of your own extends this class. Fields are checked and listed as all settings are."""

    name: str = ""  # an installed task, or the path of a class (`reverse.py:Reverse`): where prompts and rewards come from


@dataclass(frozen=True, slots=True, kw_only=True)
class CharTaskConfig(TaskConfig):
    """The shape of the tiny model of a task of characters, and what is kept for validation alone, as a share of all prompts.

    `num_heads` 0: three, or the next number that the ranks sharing a layer can share out (`engine.tensor_parallel_size`,
    `engine.sequence_parallel_size`, `rollout.tensor_parallel_size`); the console says so. `hidden_size` 0: 32 for each head, which
    all adapters compute with.
    """

    held_out_fraction: float = bounded(0.1, at_least=0, at_most=1)  # share of prompts kept for validation
    hidden_size: int = bounded(0, at_least=0)
    num_layers: int = bounded(2, at_least=1)  # layers of the tiny model
    num_heads: int = bounded(0, at_least=0)
    intermediate_size: int = bounded(256, at_least=1)  # width of the tiny model's feed-forward part
    careless: float = bounded(
        0.7, at_least=0, at_most=1
    )  # share of the warm-up's examples of a careless hand

    def shaped(self, *sharing: int) -> Self:
        """Return the same with a number of heads, which each of `sharing` ranks divide if there is such a number, and their size."""
        heads, width = self.num_heads, self.hidden_size
        if not heads:
            shared = lcm(*sharing)
            some = range(USUAL_HEADS, (width or 2 * USUAL_HEADS * shared) // 2 + 1)
            fitting = (each for each in some if not each % shared and not width % (2 * each))
            heads = next(fitting, USUAL_HEADS)
        return replace(self, num_heads=heads, hidden_size=width or HEAD_DIM * heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticConfig(CharTaskConfig):
    """Sums to be worked out column by column, with a tiny model and tokenizer made on the spot.

    `level` is the number of digits of both operands. Each column but the last carries with probability `carry_share`.
    A careless hand leaves out every carry, and is right sometimes.
    """

    name: str = "arithmetic"
    level: int = bounded(2, at_least=1)
    carry_share: float = bounded(0.7, at_least=0, at_most=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalculatorConfig(CharTaskConfig):
    """Problems of two-digit numbers, and a calculator to be asked in several turns; a careless hand guesses some number at once."""

    name: str = "calculator"


@dataclass(frozen=True, slots=True, kw_only=True)
class CountdownConfig(CharTaskConfig):
    """Numbers and a target that an expression of them must be worth; a careless hand gives up after its first try."""

    name: str = "countdown"
    count: int = bounded(3, at_least=2, at_most=6)  # numbers of a problem
    used: int = bounded(2, at_least=2, at_most=4)  # of these by the expression that the target comes from
    largest: int = bounded(9, at_least=2, at_most=99)  # the largest of them


@dataclass(frozen=True, slots=True, kw_only=True)
class WordGameConfig(CharTaskConfig):
    """A hidden word, guessed in several turns, each marked letter by letter; a careless hand says its first word again and again."""

    name: str = "word_game"
    letters: int = bounded(4, at_least=2, at_most=8)  # letters that the word may have
    length: int = bounded(3, at_least=2, at_most=4)  # of the word
    guesses: int = bounded(5, at_least=2, at_most=10)  # after which the game is lost


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlConfig(CharTaskConfig):
    """Questions to a small database, asked in SQL and then answered; a careless hand leaves the condition out."""

    name: str = "sql"
    rows: int = bounded(8, at_least=1, at_most=50)  # of the table


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeConfig(CharTaskConfig):
    """Functions of one argument in Python, which unit tests judge; a careless hand leaves brackets out."""

    name: str = "code"
    steps: int = bounded(3, at_least=2, at_most=6)  # of a function


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptConfig(TaskConfig):
    """Prompts for a model of its own tokenizer.

    `chat_template` "auto" applies the tokenizer's template, if it has one, to lists of
    messages, and to plain text as the user's message, but for text that holds special tokens of the tokenizer, a template's work
    already; "always" applies it to all text, "never" to none.
    """

    max_prompt_tokens: int = bounded(256, at_least=1)  # most tokens of a prompt
    chat_template: Literal["auto", "always", "never"] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsConfig(PromptConfig):
    """Prompts from files: JSONL, parquet or CSV, by the ending of the name.

    A path may be a pattern (`train-*.parquet`), or name files of a dataset that is in the hub's cache on this machine:
    `hf://datasets/owner/name/data/train-*.parquet`, or a split of it, `hf://datasets/owner/name:train`, with its config where it has several
    (`owner/name/main:train`), and with `@revision` behind the name where that is not the main one.
    Of several files of `train_path` the rows are one set; each of `validation_path` is a set of its own, measured by itself, too.
    """

    train_path: str | tuple[str, ...] = ""  # file of the prompts to train on, or several
    validation_path: str | tuple[str, ...] = ""  # file of the prompts to validate on, or several
    columns: dict[str, str] = field(default_factory=dict[str, str], metadata={"free": True})
    """What columns are called in the files, by their names here: task.columns.prompt=question."""
    filter: str = ""
    """Function of a row that says whether it is taken, package.module:function or file.py:function."""
    overlong: Literal["refuse", "filter"] = "refuse"
    """What follows a prompt of more than max_prompt_tokens: it is refused with its row, or left out and counted."""

    def paths(self, setting: RowFiles) -> tuple[str, ...]:
        """Return the files that `setting` names."""
        given: str | tuple[str, ...] = getattr(self, setting)
        return ((given,) if given else ()) if isinstance(given, str) else given


@dataclass(frozen=True, slots=True, kw_only=True)
class Gsm8kConfig(RowsConfig):
    """Grade-school word problems in the public format: `question`, and `answer` that ends in `#### 42`.

    `answer` "strict" takes the number after `####`, "flexible" the last number of the completion.
    """

    name: str = "gsm8k"
    answer: Literal["strict", "flexible"] = "strict"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileConfig(RowsConfig):
    """Any prompts with any reward.

    `reward` names one function or several, "package.module:function" or "folder/file.py:function" (docs/rewards.md), or a class that
    scores groups (docs/plug-ins.md); of functions it is their sum. Without a `correct_at` one of 1 is right and one of 0 wrong, and where
    a reward is neither no accuracy is measured.
    Prompts are the column `prompt`; supervised training learns from `answer`, and `label` says true or false of it (KTO).
    """

    name: str = "file"
    reward: str | tuple[str, ...] = ""
    reward_weights: tuple[float, ...] = ()  # what each function is multiplied by; 1 if empty
    correct_at: float | None = None  # reward from which on a completion is right; null: 1 is, and 0 is wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedConfig(PromptConfig):
    """Prompts that a program makes; a share `held_out_fraction` of all that it can make is kept for validation alone."""

    held_out_fraction: float = bounded(0.1, more_than=0, at_most=0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairsConfig(RowsConfig):
    """Prompts with two completions, of which one is preferred: text, or messages, in the columns `prompt`, `chosen` and `rejected`."""

    name: str = "pairs"
