"""What tasks that read prompts from files share: tokenizer, chat template, length limit, epochs."""

# transformers is typed in part; tokenizers are called here.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import re
from array import array
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, cast

from offbeat_recipes.errors import DataError, TaskError
from offbeat_recipes.tasks.rows import Stream, epoch_indices, is_text, read_rows
from offbeat_trainer import Example, Prompt
from offbeat_trainer.data.loading import load_object
from offbeat_trainer.errors import LoadError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from transformers import PreTrainedTokenizerBase

    from offbeat_recipes.tasks.config import PromptConfig, RowsConfig
    from offbeat_recipes.tasks.rows import Row

Messages = list[dict[str, str]]
_NAMED = 3  # overlong rows that a refusal names
_AT_ONCE = (
    1000  # texts: tokenizers make a batch in parallel, and keep some 100 bytes a token until it is made
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """A prompt as it waits for its step, its tokens in four bytes each: a tuple of Python's numbers takes up to nine times that."""

    waiting: Prompt
    token_ids: array[int]

    @property
    def prompt(self) -> Prompt:
        """The prompt as it is handed out."""
        return replace(self.waiting, token_ids=tuple(self.token_ids))


class PromptMaker:
    """Turns what a row asks into a `Prompt`, with the tokenizer of the model in `model_path`."""

    def __init__(self, model_path: str, chat_template: str, *, trust_remote_code: bool = False) -> None:
        """Keep both; the tokenizer is loaded at first use. `chat_template` is as in `RowsConfig`."""
        self._model_path = model_path
        self._chat_template = chat_template
        self._trust_remote_code = trust_remote_code
        self._encoded: dict[str, array[int]] = {}

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer.

        Raises:
            TaskError: the folder has none.
        """
        from transformers import AutoTokenizer

        if not self._model_path or not Path(self._model_path).is_dir():
            raise TaskError(
                f"model.path: this task needs a local Hugging Face folder, got {self._model_path!r}"
            )
        try:
            made = AutoTokenizer.from_pretrained(
                self._model_path, local_files_only=True, trust_remote_code=self._trust_remote_code
            )
        except Exception as error:  # tokenizers raises a plain one for a file that is damaged
            said = (str(error).splitlines() or [type(error).__name__])[0]
            there = any(Path(self._model_path).glob("tokenizer*")) or any(
                Path(self._model_path).glob("vocab*")
            )
            what = "the tokenizer in {} cannot be read" if there else "no tokenizer in {}"
            remedy = "; model.trust_remote_code=true lets it run" if "custom code" in said else ""
            raise TaskError(f"model.path: {what.format(self._model_path)}: {said}{remedy}") from error
        return cast("PreTrainedTokenizerBase", made)

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(self.tokenizer.chat_template)

    def load(self, asked: Sequence[tuple[Row, str | Messages]], held_out: str = "") -> list[_Loaded]:
        """Return the prompts of rows, of the validation set `held_out`, with what each asks, text templated where that is due.

        Raises:
            DataError: messages for a tokenizer without a template, or templates ruled out by the settings.
        """
        texts = [
            (self._apply(row, one), False)
            if not isinstance(one, str) or self._templates(one)
            else (one, True)
            for row, one in asked
        ]
        # A template writes its special tokens itself: rows that follow each other without one are a batch, and those with one.
        made = [
            ids
            for special, rows in groupby(texts, key=itemgetter(1))
            for ids in self._tokens([text for text, _ in rows], special=special)
        ]
        return [
            _Loaded(
                waiting=Prompt(
                    uid=f"{Path(row.path).name}:{row.number}",
                    text=text,
                    token_ids=(),
                    data=row.values,
                    held_out=held_out,
                ),
                token_ids=ids,
            )
            for (row, _), (text, _), ids in zip(asked, texts, made, strict=True)
        ]

    def _tokens(self, texts: Sequence[str], *, special: bool) -> list[array[int]]:
        batches = [list(texts[first : first + _AT_ONCE]) for first in range(0, len(texts), _AT_ONCE)]
        made = (self.tokenizer(batch, add_special_tokens=special)["input_ids"] for batch in batches)
        return [array("i", ids) for batch in made for ids in batch]

    def _templates(self, text: str) -> bool:
        """Say whether plain `text` becomes a message of the user."""
        if self._chat_template != "auto":
            return self._chat_template == "always"
        done = any(token in text for token in self.tokenizer.all_special_tokens)
        return self.has_template and not done

    def notes_on(self, asked: Sequence[str | Messages]) -> tuple[str, ...]:
        """Return what the person who starts the run should know of templates."""
        plain = [one for one in asked if isinstance(one, str)]
        if not plain or not self.has_template:
            return ()
        count = sum(self._templates(one) for one in plain)
        if count:
            other = "task.chat_template=never takes text as it is"
            return (
                f"{count} of {len(plain)} prompts of plain text go through the chat template, as the user's message; {other}",
            )
        return (
            f"{len(plain)} prompts of plain text are taken as they are, and the tokenizer has a chat template; "
            "task.chat_template=always applies it",
        )

    def encode(self, answers: Sequence[str]) -> list[array[int]]:
        """Return the tokens of supervised completions, end token included; the same text is tokenized once in a run."""
        new = list({text: None for text in answers if text not in self._encoded})
        end = array("i", self.stop_token_ids()[:1]) if new else array("i")
        made = [ids + end for ids in self._tokens(new, special=False)]
        self._encoded.update(zip(new, made, strict=True))
        return [self._encoded[text] for text in answers]

    def stop_token_ids(self) -> tuple[int, ...]:
        """Return the tokenizer's end token and those that the model's generation config adds."""
        ends = [self.tokenizer.eos_token_id]
        listed = Path(self._model_path) / "generation_config.json"
        if listed.is_file():
            more = json.loads(listed.read_text(encoding="utf-8")).get("eos_token_id")
            ends += more if isinstance(more, list) else [more]
        return tuple(dict.fromkeys(int(end) for end in ends if isinstance(end, int)))

    def _apply(self, row: Row, asked: str | Messages) -> str:
        if self._chat_template == "never":
            raise DataError(
                f"{row.place}: a list of messages, and task.chat_template is never; give plain text"
            )
        if not self.has_template:
            raise DataError(
                f"{row.place}: needs a chat template, and the model's tokenizer has none; "
                "give plain text, or a model with a template"
            )
        messages: Messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        try:
            made = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program: it may refuse a role, or be wrong
            raise DataError(
                f"{row.place}: the model's chat template does not take it: {error}; write the messages as it wants them, or "
                "give plain text and task.chat_template=never"
            ) from error
        return str(made)


class ModelTask:
    """A task whose prompts are for the model in a folder, made with its tokenizer."""

    def __init__(self, config: PromptConfig, model_path: str, *, trust_remote_code: bool = False) -> None:
        """Keep `config` and folder; the tokenizer is loaded at first use."""
        self.maker = PromptMaker(model_path, config.chat_template, trust_remote_code=trust_remote_code)
        self.max_prompt_tokens = config.max_prompt_tokens
        self.notes: tuple[str, ...] = ()
        self._model_path = model_path

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return self.maker.tokenizer

    def answer(self, prompt: Prompt) -> str:
        """Return what supervised training learns to answer to `prompt`."""
        raise NotImplementedError(f"{type(self).__name__} has nothing for supervised training")

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, without special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def stop_token_ids(self) -> tuple[int, ...]:
        """Return the tokens that end a completion."""
        return self.maker.stop_token_ids()

    def model_folder(self, cache_dir: Path, seed: int) -> Path:
        """Return the folder the settings name; nothing is made."""
        del cache_dir, seed
        return Path(self._model_path)

    def _worked(self, prompts: Sequence[Prompt]) -> list[Example]:
        made = self.maker.encode([self.answer(prompt) for prompt in prompts])
        return [
            Example(prompt_ids=prompt.token_ids, completion_ids=tuple(ids))
            for prompt, ids in zip(prompts, made, strict=True)
        ]


class TextTask(ModelTask):
    """Prompts of two files. Subclasses say what a row asks, what it teaches, and what a completion is worth."""

    def __init__(
        self, config: RowsConfig, model_path: str, seed: int, *, trust_remote_code: bool = False
    ) -> None:
        """Read both files and make their prompts.

        Raises:
            TaskError: a file, a row or the tokenizer cannot be used.
        """
        super().__init__(config, model_path, trust_remote_code=trust_remote_code)
        self._config = config
        self._seed = seed
        self._train = [row for path in config.paths("train_path") for row in self._load("train_path", path)]
        if not self._train:
            raise TaskError("task.train_path: needed, a JSONL, parquet or CSV file")
        held_out = config.paths("validation_path")
        self._validation = [self._load("validation_path", path, name) for path, name in _named(held_out)]

    @property
    def num_train_prompts(self) -> int:
        """How many different prompts there are."""
        return len(self._train)

    @property
    def columns(self) -> dict[str, object]:
        """The first row of the training data, by column."""
        return dict(self._train[0].waiting.data)

    def asked(self, row: Row) -> str | Messages:
        """Return what `row` asks."""
        raise NotImplementedError(f"{type(self).__name__} does not say what a row asks")

    def prompts(self, step: int, num_prompts: int) -> list[Prompt]:
        """Return the prompts of `step`: none twice in an epoch; a pure function of seed and step."""
        return self._take(step, num_prompts, Stream.PROMPTS)

    def validation_prompts(self, num_prompts: int) -> list[Prompt]:
        """Return the first `num_prompts` prompts of each validation file.

        Raises:
            TaskError: there is no such file, and some are wanted.
        """
        if num_prompts and not self._config.validation_path:
            raise TaskError(
                "task.validation_path: needed, a JSONL, parquet or CSV file; trainer.validation_prompts=0 validates nothing"
            )
        return [row.prompt for row in self._held_out(num_prompts)]

    def examples(self, step: int, num_examples: int) -> list[Example]:
        """Return supervised pairs of training rows; a pure function of seed and step."""
        return self._worked(self._take(step, num_examples, Stream.EXAMPLES))

    def validation_examples(self, num_examples: int) -> list[Example]:
        """Return supervised pairs of the first `num_examples` rows of each validation file.

        Raises:
            DataError: one of them has no answer.
        """
        return self._worked(self.validation_prompts(num_examples))

    def longest_row(self, reads: str, num_held_out: int) -> tuple[int, str]:
        """Return the tokens of the longest row that is learned from, or of the first held-out ones, and which row that is.

        `reads` is what of a row is learned from: its "examples", or what else the task has.
        """
        rows = [*self._train, *self._held_out(num_held_out)]
        texts = [self._learned(row.waiting, reads) for row in rows]
        self.maker.encode([one for of_row in texts for one in of_row])  # all at once, which takes less
        longest = (max(map(len, self.maker.encode(of_row))) for of_row in texts)
        return max(
            (len(row.token_ids) + more, row.waiting.uid) for row, more in zip(rows, longest, strict=True)
        )

    def _learned(self, prompt: Prompt, reads: str) -> list[str]:
        """Return the completions that the row of `prompt` has of what is learned from."""
        assert reads in ("examples", "labelled"), f"a row of text has no {reads}"
        return [self.answer(prompt)]

    def _held_out(self, num_rows: int) -> list[_Loaded]:
        return [row for of_file in self._validation for row in of_file[:num_rows]]

    def _take(self, step: int, count: int, purpose: Stream) -> list[Prompt]:
        if count > len(self._train):
            raise TaskError(
                f"a step takes {count} different prompts, and task.train_path has {len(self._train)}"
            )
        return [
            self._train[row].prompt
            for row in epoch_indices(len(self._train), step, count, self._seed, purpose)
        ]

    def _load(self, setting: str, path: str, held_out: str = "") -> list[_Loaded]:
        asked = [(row, self.asked(row)) for row in self._kept(path)]
        if setting == "train_path":
            self.notes += self.maker.notes_on([one for _, one in asked])
        made = self.maker.load(asked, held_out)
        limit, overlong = self.max_prompt_tokens, list[int]()
        for (row, _), one in zip(asked, made, strict=True):
            if not one.token_ids:
                raise TaskError(
                    f"{path}, row {row.number}: the tokenizer makes no token of {one.waiting.text!r}; leave it out"
                )
            if len(one.token_ids) > limit:
                overlong.append(row.number)
        if overlong:
            self._refuse_or_note(path, overlong, len(made))
        kept = [one for one in made if len(one.token_ids) <= limit]
        if not kept:
            raise DataError(f"{path}: every prompt is longer than task.max_prompt_tokens {limit}")
        return kept

    def _kept(self, path: str) -> list[Row]:
        """Return the rows of a file that `task.filter` takes, their columns by our names."""
        rows = [_renamed(row, self._config.columns) for row in read_rows(path)]
        if not self._config.filter:
            return rows
        try:
            keeps = cast("Callable[[Mapping[str, object]], object]", load_object(self._config.filter))
        except LoadError as error:
            raise TaskError(f"task.filter: {error}") from error
        kept: list[Row] = []
        for row in rows:
            try:
                kept += [row] if keeps(row.values) else []
            except Exception as error:  # a user's function
                raise TaskError(f"task.filter: of {row.place}: {type(error).__name__}: {error}") from error
        if not kept:
            raise TaskError(f"task.filter: takes none of {len(rows)} rows of {path}")
        self.notes = (*self.notes, f"{path}: task.filter takes {len(kept)} of {len(rows)} rows")
        return kept

    def _refuse_or_note(self, path: str, overlong: Sequence[int], total: int) -> None:
        limit = self.max_prompt_tokens
        rows = ", ".join(str(number) for number in overlong[:_NAMED])
        if len(overlong) > _NAMED:
            rows += ", ..."
        what = f"{path}: {len(overlong)} of {total} prompts have more than {limit} tokens (rows {rows})"
        if self._config.overlong == "refuse":
            raise DataError(f"{what}; raise task.max_prompt_tokens, or task.overlong=filter leaves them out")
        self.notes = (*self.notes, f"{what}; left out")


def _named(paths: Sequence[str]) -> list[tuple[str, str]]:
    """Return each file with the name of its validation set, that of the file; "" where there is only one.

    Raises:
        TaskError: two would have one name.
    """
    names = [re.sub(r"\W+", "_", Path(path).stem).strip("_") for path in paths]
    if len({*names}) < len(names):
        raise TaskError(
            f"task.validation_path: sets go by the names of their files, and these are {', '.join(names)}; rename one"
        )
    return [*zip(paths, names if len(paths) > 1 else [""] * len(paths), strict=True)]


def _renamed(row: Row, columns: Mapping[str, str]) -> Row:
    """Return `row` with the columns that `columns` names called as it says.

    Raises:
        DataError: it has no such column.
    """
    if not columns:
        return row
    values = {key: value for key, value in row.values.items() if key not in columns.values()}
    for ours, theirs in columns.items():
        if theirs not in row.values:
            has = ", ".join(sorted(row.values))
            raise DataError(f"{row.place}: no {theirs!r}, which task.columns.{ours} names; it has {has}")
        values[ours] = row.values[theirs]
    return replace(row, values=values)


def messages_or_text(row: Row, key: str) -> str | Messages:
    """Return what `row` has under `key`.

    Raises:
        DataError: it is neither text nor a list of messages.
    """
    value = row.get(key)
    if isinstance(value, str):
        return row.text(key)
    messages = cast("list[object]", value) if isinstance(value, list) else []
    if not messages or not all(_is_message(item) for item in messages):
        raise DataError(
            f'{row.place}: {key!r} must be text or a list of {{"role": ..., "content": ...}}, got {value!r}'
        )
    return cast("Messages", messages)


def _is_message(item: object) -> bool:
    if not isinstance(item, dict):
        return False
    message = cast("dict[object, object]", item)
    return is_text(message.get("role")) and is_text(message.get("content"))
