"""What tasks of characters share: a tokenizer with one token per character, and a tiny model that is made on the spot."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat_recipes.errors import TaskError
from offbeat_recipes.models.char import (
    CharModelShape,
    char_model_folder,
    char_tokenizer,
    folder_vocabulary,
)
from offbeat_recipes.tasks.config import HEAD_DIM, USUAL_HEADS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerFast

    from offbeat_recipes.tasks.config import CharTaskConfig


class CharTask:
    """A task whose texts are of the characters of `alphabet`."""

    def __init__(self, config: CharTaskConfig, alphabet: str, model_path: str = "") -> None:
        """Take the model's shape from `config`; `model_path` names a model instead of a fresh one.

        Raises:
            TaskError: a shape that cannot be.
        """
        config = config.shaped()
        if config.hidden_size % (2 * config.num_heads):
            raise TaskError(
                f"task.hidden_size {config.hidden_size} must be a multiple of twice task.num_heads "
                f"({config.num_heads}): rotary positions turn pairs of each head's dimensions"
            )
        self.alphabet = alphabet
        self.notes: tuple[str, ...] = ()
        if config.num_heads != USUAL_HEADS and not model_path:
            made = (
                f"its model has {config.num_heads} attention heads and a hidden size of {config.hidden_size}"
            )
            self.notes = (f"{made}; {USUAL_HEADS} and {USUAL_HEADS * HEAD_DIM} are usual",)
        self._shape_config = config
        self._model_path = model_path

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """One token per character; see `offbeat_recipes.models.char`."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        return char_tokenizer(self.alphabet)

    @cached_property
    def shape(self) -> CharModelShape:
        """The shape of the model that the task makes."""
        config = self._shape_config
        return CharModelShape(
            alphabet=self.alphabet,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            intermediate_size=config.intermediate_size,
            # In wide models larger weights magnify each rounding from layer to layer.
            initializer_range=min(0.1, config.hidden_size**-0.5),
        )

    def model_folder(self, cache_dir: Path, seed: int) -> Path:
        """Return a folder with a model of `shape`, its weights drawn from `seed`; made where it is not there.

        Raises:
            TaskError: a model was named, and its tokens are not this task's.
        """
        if not self._model_path:
            return char_model_folder(self.shape, cache_dir, seed)
        if folder_vocabulary(Path(self._model_path)) != self.tokenizer.get_vocab():
            raise TaskError(
                f"model.path: {self._model_path} has not the tokens of this task ({self.alphabet})"
            )
        return Path(self._model_path)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the characters of `token_ids`, without the end token."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def stop_token_ids(self) -> tuple[int, ...]:
        """Return the end token."""
        end = self.tokenizer.eos_token_id
        assert isinstance(end, int)
        return (end,)

    def _raw(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._ids[character] for character in text)

    @cached_property
    def _ids(self) -> dict[str, int]:
        vocabulary = self.tokenizer.get_vocab()
        return {character: vocabulary[character] for character in self.alphabet}
