"""Texts that end a completion: its tokens become text one by one, as vLLM does it and by the same library."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportMissingTypeStubs=false
# tokenizers and transformers are typed in part.

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from tokenizers.decoders import DecodeStream

from offbeat_rollout.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer


def load_tokenizer(model_path: str, *, trust_remote_code: bool = False) -> Tokenizer:
    """Return the tokenizer in the folder `model_path`, whose own code runs where that is trusted.

    Raises:
        ConfigError: there is none that can be read.
    """
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(
            model_path, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot read the tokenizer in {model_path!r}: {error}") from error
    return cast("Tokenizer", loaded.backend_tokenizer)


class StopStrings:
    """Watches the text of one completion for the first of some strings to be complete."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: Sequence[str]) -> None:
        """Watch for `stop`; the prompt decides how the first token is written, and its own text does not count."""
        self._tokenizer = tokenizer
        self._stop = stop
        self._stream = DecodeStream(ids=list(prompt_ids), skip_special_tokens=False)
        self._reach = max(map(len, stop)) - 1  # characters that a string yet to come may have begun with
        self._tail = ""

    def add(self, token_id: int) -> str | None:
        """Take the next token; return the string it completes, the one that ends first, or None."""
        text = self._tail + self._written(token_id)
        self._tail = text[len(text) - self._reach :] if len(text) > self._reach else text
        ends = [(text.find(one) + len(one), place) for place, one in enumerate(self._stop) if one in text]
        return self._stop[min(ends)[1]] if ends else None

    def _written(self, token_id: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception as error:
            # Bytes that are no UTF-8 can make the text shorter, which the library's state does not survive.
            if "Invalid prefix" not in str(error):
                raise
            self._stream = DecodeStream(skip_special_tokens=False)
            return self._stream.step(self._tokenizer, token_id) or ""
