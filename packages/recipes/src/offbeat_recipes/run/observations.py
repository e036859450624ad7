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


def observation_encoder(
    tokenizer: PreTrainedTokenizerBase,
) -> Callable[[Observation, int | None], list[int]]:
    """Return what makes tokens of text, of messages, or of tokens, for `MultiTurn`: `(observation, last sampled token)`."""

    def encode(observation: Observation, last: int | None) -> list[int]:
        if isinstance(observation, str):
            return _ids(tokenizer, observation)
        if any(isinstance(one, Mapping) for one in observation):
            return after_turn(tokenizer, cast("Sequence[Message]", observation), last)
        return [int(one) for one in cast("Sequence[int]", observation)]

    return encode


def after_turn(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], last: int | None
) -> list[int]:
    """Return the tokens with which the chat template goes on after an assistant's turn whose last sampled token is `last`.

    The template is asked about a made-up conversation: no token of the real one is ever written anew. Its end of the turn is
    left out where the policy sampled it, and added where the turn ended otherwise: at a stop text or another end token.

    Raises:
        TaskError: no turn came before (`last` is None), there is no template, or it does not leave an assistant's turn as it is.
    """
    if last is None:
        raise TaskError(
            "`reset` returned messages, and the prompt already opens the assistant's turn: put them into the prompt, or "
            "return text or token ids"
        )
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
    ids = _ids(tokenizer, rest)
    return ids[1:] if ids[:1] == [last] else ids


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(cast("list[int]", tokenizer(text, add_special_tokens=False)["input_ids"])) if text else []
