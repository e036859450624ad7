"""The model as the loss sees it: what it says of chosen tokens, instead of logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from offbeat_engine.fsdp2 import families
from offbeat_engine.toolkit.hf.rotary import sequence_limit
from offbeat_engine.toolkit.step.logprobs import token_logprobs

if TYPE_CHECKING:
    from offbeat_engine.fsdp2.weights.loading import OnMeta
    from offbeat_engine.toolkit.hf.layouts import Layout


class Scorer(torch.nn.Module):
    """A Hugging Face model that answers with what the loss needs instead of logits.

    Only the base model and the head run, so a mixture of experts adds no auxiliary loss for its router.
    """

    def __init__(
        self, hf: Any, head: str, base: dict[str, int] | None = None, on_meta: OnMeta | None = None
    ) -> None:
        super().__init__()
        self.hf = hf
        self.head = head
        # In a tuple, so that they stay children of `hf` alone.
        self.sequence_limit = sequence_limit(hf.config.get_text_config())
        self._ends = (families.decoder_of(hf), families.head_of(hf))
        self.base = {} if base is None else base  # fingerprints of what checkpoints leave out
        self.on_meta = on_meta  # where the weights are, while `hf` does not hold them

    def forward(self, layout: Layout, entropy_gradient: bool) -> tuple[torch.Tensor, ...]:
        """Return `(logprobs_M, entropy_M)`, or `(values_M,)` with a value head; float32."""
        decoder, head = self._ends
        assert decoder is not None, "families.refusals let it pass"
        assert head is not None, "families.refusals let it pass"
        states = decoder(**layout.model_inputs, use_cache=False).last_hidden_state
        hidden_MH = states.flatten(0, 1).index_select(0, layout.select_M)
        if self.head == "value":
            return (head(hidden_MH).float().sum(-1),)  # of one: no view, of which FSDP2 warns
        return token_logprobs(hidden_MH, head, layout.targets_M, layout.temperature_M, entropy_gradient)

    def plain(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Return what Hugging Face's own forward makes of `inputs`, float32 [B, T, V], or [B, T, 1] with a value head."""
        return self.hf(**inputs, use_cache=False).logits.float()
