"""What replaces megatron-core's own in its local spec: norms as Hugging Face computes them, attention that knows packed rows."""

# megatron-core is untyped, and so is what is handed to its modules.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any

import torch
from torch.nn import functional

from offbeat_engine.toolkit.step.planning import plan_length_classes

# S = tokens of a packed row, N = sequences of one class of lengths, L = the longest of them, A = heads here, D = head size.


class RmsNorm(torch.nn.Module):
    """Root mean square norm (arXiv 1910.07467) in float32, rounded where Hugging Face rounds.

    Its gradient is a part of the whole where the ranks of a tensor share the tokens, which megatron-core adds up then.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: object) -> None:  # noqa: ANN401
        super().__init__()
        on = torch.device("cpu") if config.use_cpu_initialization else torch.device("cuda")
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=on))
        self.eps = eps
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 a name of megatron-core's

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return `states` over their root mean square, times the weight."""
        wide = states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(states.dtype)


class Attention(torch.nn.Module):
    """Causal attention over a packed row; the place of a mask is taken by the lengths of its sequences, int64 on the CPU.

    Sequences of similar length go through PyTorch's kernel together, padded to the longest of them: what is to the right of
    a token does not reach it. No matrix of the whole row's size exists.
    """

    def __init__(self, config: Any, layer_number: int, **_: object) -> None:  # noqa: ANN401
        super().__init__()
        self.window: int | None = config.offbeat_windows[layer_number - 1]
        self.rotary_scaling: float = config.offbeat_rotary_scaling

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor,
        **_: object,
    ) -> torch.Tensor:
        """Return what the tokens of `query` [S, 1, A, D] gather, [S, 1, A * D]; `key` and `value` may have fewer heads."""
        lengths = tuple(map(int, attention_mask.tolist()))
        rows = [states.squeeze(1) for states in (query, key, value)]
        found = torch.zeros_like(rows[0])
        for index_NL, real_R, place_R in _classes(lengths, query.device):
            queries, keys, values = (states[index_NL].transpose(1, 2) for states in rows)
            longest = index_NL.shape[1]
            seen = None if self.window is None or longest <= self.window else _seen(longest, self.window)
            out = functional.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=None if seen is None else seen.to(query.device, non_blocking=True),
                is_causal=seen is None,
                # Cosine and sine of query and of key are this much longer.
                scale=self.rotary_scaling**2 / math.sqrt(query.shape[-1]),
                enable_gqa=queries.shape[1] != keys.shape[1],
            )
            found = found.index_put((place_R,), out.transpose(1, 2).flatten(0, 1)[real_R])
        return found.flatten(1)[:, None]


@lru_cache(maxsize=64)
def _classes(
    lengths: tuple[int, ...], device: torch.device
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...]:
    """Return for each class of lengths: where its tokens lie in the row [N, L], which of [N * L] are real, and where those go."""
    starts = torch.tensor((0, *lengths)).cumsum(0)
    classes: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for members in plan_length_classes(lengths):
        length_N = torch.tensor([lengths[index] for index in members])
        position_L = torch.arange(int(length_N.max()))
        index_NL = starts[torch.tensor(members)][:, None] + position_L
        real_R = (position_L < length_N[:, None]).flatten().nonzero().squeeze(1)
        place_R = index_NL.flatten()[real_R]
        index_NL = index_NL.clamp(max=int(starts[-1]) - 1)  # padding looks at some token, which nobody sees
        at = partial(torch.Tensor.to, device=device, non_blocking=True)
        classes.append((at(index_NL), at(real_R), at(place_R)))
    return tuple(classes)


@lru_cache(maxsize=8)
def _seen(length: int, window: int) -> torch.Tensor:
    apart = torch.arange(length)[:, None] - torch.arange(length)
    return (apart >= 0) & (apart < window)


class Rotary(torch.nn.Module):
    """Rotary angles (arXiv 2104.09864) of the row at hand, by each token's position in its own sequence.

    Frequencies are Hugging Face's own, and so is `scaling`, the factor on cosine and sine (yarn, arXiv 2309.00071; longrope), which
    attention takes. megatron-core asks for as many angles as a row is long, and hands them to the layers;
    `positions_S` is set before each forward pass.
    """

    def __init__(self, config: Any) -> None:  # noqa: ANN401 a config of transformers
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        super().__init__()
        theirs: Any = LlamaRotaryEmbedding(config)
        self._frequencies: torch.Tensor = theirs.inv_freq.float()
        self.scaling = float(theirs.attention_scaling)
        self.positions_S: torch.Tensor = torch.zeros(0, dtype=torch.int64)

    def get_rotary_seq_len(self, *_: object, **__: object) -> int:
        """Return the tokens of the row."""
        return len(self.positions_S)

    def forward(self, _: int, **__: object) -> torch.Tensor:
        """Return the angles, float32 [S, 1, 1, D]."""
        if self._frequencies.device != self.positions_S.device:
            self._frequencies = self._frequencies.to(self.positions_S.device, non_blocking=True)
        angles = torch.outer(self.positions_S.float(), self._frequencies)
        return torch.cat((angles, angles), -1)[:, None, None]
