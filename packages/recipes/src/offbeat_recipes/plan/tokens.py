"""Whether models of roles that have a path of their own, a teacher say, know the policy's tokens."""

# transformers is typed in part; tokenizers are called here.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from offbeat_engine.capabilities import Refusal
from offbeat_recipes.plan.algorithm import algorithm_of
from offbeat_recipes.tasks.config import ArithmeticConfig

if TYPE_CHECKING:
    from offbeat_recipes.settings.tree import RunConfig


_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


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
    if isinstance(config.task, ArithmeticConfig):
        from offbeat_recipes.tasks.arithmetic import ArithmeticTask

        return ArithmeticTask(config.task, config.seed).tokenizer.get_vocab()
    return None


def _tokens_of(path: str, config: RunConfig) -> dict[str, int]:
    from transformers import AutoTokenizer

    return dict(
        AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=config.model.trust_remote_code
        ).get_vocab()
    )
