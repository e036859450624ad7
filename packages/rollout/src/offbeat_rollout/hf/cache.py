"""Keys and values of a running batch, and the attention that reads them.

R = rows (slots), H = key-value heads, G = query heads per key-value head, S = positions, D = head dimension.

Every row keeps its tokens at positions 0..length-1 whatever its neighbours do, shapes move in steps of 16 rows and 16
positions, and what lies beyond a row's length is zero and masked. With fp32 on CPU a row's numbers then do not depend
on the rest of the batch, bit for bit (matrix kernels choose another order of sums only below 16 rows).

What a mixture's routers choose while the Transformers adapter generates. L = layers, K = experts of a token.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# transformers types its attention registry loosely.
# transformers' models are typed loosely.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from offbeat_rollout.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt
    from transformers import PreTrainedModel


ATTENTION_NAME = "offbeat_rollout"
ROW_STEP = 16
POSITION_STEP = 16
MIN_POSITIONS = 32  # below, matrix kernels of torch switch to another order of sums


def round_up(number: int, step: int) -> int:
    """Return the smallest multiple of `step` that is >= `number`, and at least `step`."""
    return max(step, -(-number // step) * step)


def round_positions(number: int) -> int:
    """Return how many positions to compute where `number` are needed."""
    return max(MIN_POSITIONS, round_up(number, POSITION_STEP))


class SlotCache:
    """A key-value cache of slots, handed to the model as `past_key_values`.

    Keys lie transposed, [H, D, S] in a slot: a single query then meets them in the order matrix kernels like, which
    halves the time of the first attention product on CPU.

    Between calls of the model the owner says what the next call is: `begin_prefill` (whole prompts, one slot each) or
    `begin_decode` (one token for each of the first R slots).
    """

    is_compileable = False
    is_sliding = (False,)

    def __init__(self, num_layers: int) -> None:
        self.keys: list[torch.Tensor | None] = [None] * num_layers  # [slots, H, D, positions]
        self.values: list[torch.Tensor | None] = [None] * num_layers  # [slots, H, positions, D]
        self.num_slots = 0
        self.num_positions = 0
        self._prefill_slots: torch.Tensor | None = None
        self._rows = 0
        self._positions = 0
        self.row_index = torch.empty(0, dtype=torch.int64)
        self._position_R = torch.empty(0, dtype=torch.int64)

    def reserve(self, num_slots: int, num_positions: int) -> None:
        """Grow to at least these sizes; what is there stays."""
        if num_slots <= self.num_slots and num_positions <= self.num_positions:
            return
        self.num_slots = max(num_slots, self.num_slots)
        self.num_positions = max(num_positions, self.num_positions)
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            if keys is None or values is None:
                continue
            slots, heads, positions, dim = values.shape
            new_keys = keys.new_zeros(self.num_slots, heads, keys.shape[2], self.num_positions)
            new_values = values.new_zeros(self.num_slots, heads, self.num_positions, dim)
            new_keys[:slots, :, :, :positions] = keys
            new_values[:slots, :, :positions] = values
            self.keys[layer], self.values[layer] = new_keys, new_values

    def begin_prefill(self, slots: torch.Tensor) -> None:
        """Make the next call write whole prompts into `slots` [n]."""
        self._prefill_slots = slots

    def begin_decode(self, position_R: torch.Tensor, num_positions: int) -> None:
        """Make the next call write one token per row at `position_R` and read the first `num_positions`."""
        self._prefill_slots = None
        self._rows = len(position_R)
        self._positions = num_positions
        self._position_R = position_R
        if len(self.row_index) != self._rows:
            self.row_index = torch.arange(self._rows, device=position_R.device)

    def move(self, source: Sequence[int], target: Sequence[int], num_positions: int | None = None) -> None:
        """Copy slots onto others, or the first positions of each: `target[i]` becomes `source[i]`."""
        for keys, values in zip(self.keys, self.values, strict=True):
            if keys is None or values is None:
                continue
            for tensor in (keys[..., :num_positions], values[:, :, :num_positions]):
                tensor[torch.tensor(target, device=tensor.device)] = tensor[
                    torch.tensor(source, device=tensor.device)
                ]

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store what the model computed for layer `layer_idx` and return what it should attend to."""
        keys, values = self._layer(key, value, layer_idx)
        if self._prefill_slots is not None:
            length = key.shape[2]
            keys[self._prefill_slots, :, :, :length] = key.transpose(2, 3)
            values[self._prefill_slots, :, :length] = value
            return key, value
        keys[self.row_index, :, :, self._position_R] = key.squeeze(2)
        values[self.row_index, :, self._position_R] = value.squeeze(2)
        return keys[: self._rows, :, :, : self._positions], values[: self._rows, :, : self._positions]

    def _layer(self, key: torch.Tensor, value: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.keys[index], self.values[index]
        if keys is None or values is None:
            # Zeros, not empty: a masked column still enters a product, and 0 * NaN is NaN.
            keys = key.new_zeros(self.num_slots, key.shape[1], key.shape[3], self.num_positions)
            values = value.new_zeros(self.num_slots, value.shape[1], self.num_positions, value.shape[3])
            self.keys[index], self.values[index] = keys, values
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the positions the next call reads (models ask; positions are always given explicitly)."""
        del layer_idx
        return 0 if self._prefill_slots is not None else self._positions

    def zero(self) -> None:
        """Forget the content, keep the room."""
        for tensor in (*self.keys, *self.values):
            if tensor is not None:
                tensor.zero_()


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Attend as `SlotCache` laid things out: causally over whole prompts, or one query per row over the cache.

    `attention_mask` is [R, 1, 1, S] in float, 0 or -inf, and used for single queries only: prompts are padded on the
    right, where a causal query never looks.
    """
    if strange := [name for name in ("s_aux", "softcap") if options.get(name) is not None]:
        raise ValueError(f"attention with {strange[0]} is not done here")
    scaling = float(options.get("scaling") or module.scaling)  # pyright: ignore[reportArgumentType]
    rows, num_heads, num_queries, head_dim = query.shape
    if num_queries > 1:
        out = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=num_heads != key.shape[1]
        )
        return out.transpose(1, 2), None
    assert attention_mask is not None
    kv_heads, positions = key.shape[1], key.shape[3]
    grouped = query.reshape(rows * kv_heads, num_heads // kv_heads, head_dim) * scaling
    scores = torch.bmm(grouped, key.flatten(0, 1))
    scores = scores.view(rows, 1, num_heads, positions).add_(attention_mask)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    out = torch.bmm(weights.view(rows * kv_heads, -1, positions), value.flatten(0, 1))
    return out.view(rows, 1, num_heads, -1), None


def register_attention() -> None:
    """Make `attention` known to Transformers under `ATTENTION_NAME`; calling it again is harmless."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, attention)


class Recorder:
    """Listens to the routers of one model: modules of transformers 5 that answer with logits, scores and experts."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Begin to listen.

        Raises:
            ConfigError: the model has no routers of that kind.
        """
        routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
        if not routers:
            raise ConfigError(
                f"`record_experts`: {type(model).__name__} has no routers that tell what they choose; leave the setting out"
            )
        self._chosen: list[torch.Tensor] = []
        for router in routers:
            router.register_forward_hook(self._keep)

    def _keep(self, _: object, __: object, output: Any) -> None:  # noqa: ANN401
        self._chosen.append(output[2])

    def take(self) -> npt.NDArray[np.int16]:
        """Return the experts of every token of the last forward pass [tokens, L, K], and forget them."""
        chosen = torch.stack(self._chosen, 1).to("cpu", torch.int16)
        self._chosen.clear()
        return chosen.numpy()
