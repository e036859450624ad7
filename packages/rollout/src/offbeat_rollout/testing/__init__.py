"""What tests of rollout engines need: a scripted engine, a tiny model with a tokenizer, and the contract every engine passes."""

from __future__ import annotations

from offbeat_rollout.testing.contract import Subject, rollout_contract, wait_for_tokens
from offbeat_rollout.testing.models import (
    make_tiny_model,
    reference_experts,
    reference_logprobs,
    write_tokenizer,
)
from offbeat_rollout.testing.scripted import ScriptedRollout

__all__ = [
    "ScriptedRollout",
    "Subject",
    "make_tiny_model",
    "reference_experts",
    "reference_logprobs",
    "rollout_contract",
    "wait_for_tokens",
    "write_tokenizer",
]
