"""What an environment says becomes tokens, once: text as it is, or messages as the model's chat template writes them."""

# transformers is typed in part; tokenizers are called here.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from offbeat_recipes.errors import TaskError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from offbeat_trainer.rollouts.environment import Message, Observation

_ANSWER = "an answer that no template knows"  # stands for the policy's turn, which is tokens already


def observation_encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Observation], list[int]]:
    """Return what makes tokens of text, of messages, or of tokens, for `MultiTurn`."""

    def encode(said: Observation) -> list[int]:
        if isinstance(said, str):
            return _ids(tokenizer, said)
        if any(isinstance(one, Mapping) for one in said):
            return _ids(tokenizer, after_turn(tokenizer, cast("Sequence[Message]", said)))
        return [int(one) for one in cast("Sequence[int]", said)]

    return encode


def after_turn(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
    """Return how the chat template goes on after an assistant's turn that ended with its end token.

    The template is asked about a made-up conversation: no token of the real one is ever written anew.

    Raises:
        TaskError: there is no template, or it does not leave an assistant's turn as it is.
    """
    if not tokenizer.chat_template:
        raise TaskError(
            "the environment speaks in messages, and the model's tokenizer has no chat template; say text"
        )
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    whole = str(
        tokenizer.apply_chat_template(
            [*talk, *map(dict, messages)], tokenize=False, add_generation_prompt=True
        )
    )
    _, answer, rest = whole.partition(_ANSWER)
    if not answer:
        raise TaskError(
            "the model's chat template does not write an assistant's turn as it is; let the environment say text"
        )
    return rest.removeprefix(str(tokenizer.eos_token))


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(cast("list[int]", tokenizer(text, add_special_tokens=False)["input_ids"])) if text else []
