"""`TrainBatch`: what a training engine is given, with its schema in writing.

B = sequences, T = tokens of the longest one, K = whatever a key has several of per token. Sequences are right-padded: prompt, then completion, then padding.
Everything of shape [B, T] is aligned to the token it speaks of: `logprobs[b, t]` is the log-probability of
`input_ids[b, t]` given the tokens before it, so position 0 never has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from tensordict import TensorDict

from offbeat_engine.errors import BatchError

TrainBatch = TensorDict


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One key of the schema, with its shape as a word: [B], [B, T], or [B, T, K] of any K."""

    key: str
    dims: Literal["B", "BT", "BTK"]
    dtype: torch.dtype = torch.float32
    required: bool = False
    meaning: str


SCHEMA: tuple[Field, ...] = (
    Field(key="input_ids", dims="BT", dtype=torch.int64, required=True, meaning="prompt, completion, padding"),
    Field(key="lengths", dims="B", dtype=torch.int64, required=True, meaning="real tokens of each sequence"),
    Field(
        key="loss_mask", dims="BT", dtype=torch.bool, required=True,
        meaning="True at tokens whose log-probability is trained or asked for; never at position 0 or in padding",
    ),
    Field(
        key="temperature", dims="B", dtype=torch.float32, required=False,
        meaning="logits are divided by it before log-probabilities are taken; absent means 1",
    ),
    Field(key="advantages", dims="BT", dtype=torch.float32, required=False, meaning="advantage of each token"),
    Field(
        key="rollout_logprobs", dims="BT", dtype=torch.float32, required=False,
        meaning="log-probabilities as the sampler saw them",
    ),
    Field(
        key="old_logprobs", dims="BT", dtype=torch.float32, required=False,
        meaning="log-probabilities under the policy that the importance ratio is taken against",
    ),
    Field(
        key="ref_logprobs", dims="BT", dtype=torch.float32, required=False,
        meaning="log-probabilities under the reference policy",
    ),
    Field(key="values", dims="BT", dtype=torch.float32, required=False, meaning="value estimates before the update"),
    Field(key="returns", dims="BT", dtype=torch.float32, required=False, meaning="targets of the value head"),
    Field(
        key="policy_version", dims="BT", dtype=torch.int64, required=False,
        meaning="version of the weights that sampled each token; -1 where none did (prompt, padding)",
    ),
    Field(
        key="routed_experts", dims="BTK", dtype=torch.int16, required=False,
        meaning="experts that the sampler's routers gave each token, layer after layer, as many in each as a token has; -1 where "
        "none were recorded (padding, a completion's last token)",
    ),
    Field(key="group", dims="B", dtype=torch.int64, required=False, meaning="index of the prompt's group"),
    Field(
        key="unit", dims="B", dtype=torch.int64, required=False,
        meaning="sequences of one number are never parted: one rank and one micro-batch has all of them (a pair of DPO)",
    ),
)  # fmt: skip


_registered: dict[str, Field] = {}


def register_field(field: Field) -> Field:
    """Add a key of an engine's or algorithm's own to what a batch may hold, in this process; returns it.

    Call it where the module that needs the key is imported: then it is known wherever that is, on the ranks too. It is cut,
    shared, checked and moved as the keys of `SCHEMA` are. Put a prefix of your own in front ("router/experts").

    Raises:
        BatchError: the key is in `SCHEMA`, or was registered with another shape, dtype or meaning.
    """
    known = next((entry for entry in schema() if entry.key == field.key), None)
    if known is not None and known != field:
        raise BatchError(
            f"the key `{field.key}` of a batch is taken: {known.dims} {known.dtype} ({known.meaning}); choose another name"
        )
    if known is None:
        _registered[field.key] = field
    return field


def schema() -> tuple[Field, ...]:
    """Return every key that a batch may hold in this process: `SCHEMA`, then what was registered."""
    return (*SCHEMA, *_registered.values())


def train_batch(**tensors: torch.Tensor) -> TrainBatch:
    """Build a `TrainBatch` from tensors named as in `schema()` and check it.

    Raises:
        BatchError: a key is missing or unknown, or a shape or dtype is not the schema's.
    """
    if "input_ids" not in tensors:
        raise BatchError("a batch needs `input_ids` [B, T] int64; got " + (", ".join(tensors) or "nothing"))
    batch = TensorDict(dict(tensors), batch_size=[tensors["input_ids"].shape[0]])
    check_batch(batch)
    return batch


def check_batch(batch: TrainBatch) -> None:
    """Raise `BatchError` naming the first key of `batch` that breaks the schema, else return."""
    check_keys(batch)
    by_key = {field.key: field for field in schema()}
    batch_size, num_tokens = batch["input_ids"].shape
    for key in map(str, batch.keys()):  # a TensorDict iterates over its batch, not its keys
        field = by_key.get(key)
        if field is None:
            raise BatchError(
                f"unknown key `{key}` in a batch; the schema has {', '.join(by_key)} (`register_field` adds one of your own)"
            )
        shape = (batch_size,) if field.dims == "B" else (batch_size, num_tokens)
        tensor = batch[key]
        dims = len(field.dims)
        if tensor.ndim != dims or tuple(tensor.shape[:2]) != shape or tensor.dtype != field.dtype:
            wanted = [*map(str, shape), "K"][:dims]
            raise BatchError(
                f"`{key}` must be [{', '.join(wanted)}] {field.dtype} ({field.meaning}), "
                f"got {list(tensor.shape)} {tensor.dtype}"
            )
    _check_values(batch, num_tokens)


def select_rows(batch: TrainBatch, rows: list[int]) -> TrainBatch:
    """Return the sequences numbered `rows`, in that order, cut to the longest of them."""
    rows_b = torch.tensor(rows, dtype=torch.int64, device=batch["lengths"].device)
    longest = int(batch["lengths"][rows_b].max()) if rows else 0
    per_token = {field.key for field in schema() if field.dims != "B"}
    tensors: dict[str, torch.Tensor] = {}
    for key in map(str, batch.keys()):
        tensor = batch[key].index_select(0, rows_b)
        tensors[key] = tensor[:, :longest] if key in per_token else tensor
    return TensorDict(tensors, batch_size=[len(rows)])  # pyright: ignore[reportArgumentType]


def units_of(batch: TrainBatch) -> list[int] | None:
    """Return the unit of each sequence, for plans; None where each may stand alone."""
    return [int(unit) for unit in batch["unit"].tolist()] if "unit" in batch else None


def fingerprint(batch: TrainBatch) -> int:
    """Return a number that differs, all but surely, between batches of other tokens, lengths or masks."""
    ids_BT = batch["input_ids"] * 2 + batch["loss_mask"]
    weight_BT = torch.arange(1, ids_BT.numel() + 1, device=ids_BT.device).view(ids_BT.shape)
    return int((ids_BT * weight_BT).sum() + batch["lengths"].sum())


def check_keys(batch: TrainBatch) -> None:
    """Raise `BatchError` naming the first required key that `batch` has not, else return."""
    for field in SCHEMA:  # what is registered is never required: batches are made before anybody asks for it
        if field.required and field.key not in batch:
            dims = ", ".join(field.dims)
            raise BatchError(
                f"a batch needs `{field.key}` [{dims}] {field.dtype} ({field.meaning}), got "
                f"{', '.join(sorted(map(str, batch.keys()))) or 'nothing'}; make batches with `train_batch`"
            )


def check_replay(batch: TrainBatch, replays: bool) -> None:
    """Raise `BatchError` where experts come for an engine that does not replay them (`Feature.ROUTED_EXPERTS`)."""
    if "routed_experts" in batch and not replays:
        raise BatchError(
            "this engine's routers choose experts themselves, and the batch brings `routed_experts`; leave the key out, or take "
            "an engine that declares `routed_experts`"
        )


def check_tokens(batch: TrainBatch, vocab_size: int | None) -> None:
    """Raise `BatchError` where a token, but for padding, is none of a model of `vocab_size`; None: that is not known."""
    if vocab_size is None:
        return
    ids_BT = batch["input_ids"]
    real_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device) < batch["lengths"][:, None]
    odd_M = ids_BT[real_BT & ((ids_BT < 0) | (ids_BT >= vocab_size))]
    if odd_M.numel():
        raise BatchError(
            f"`input_ids` hold {odd_M.numel()} tokens that the model has not, such as {int(odd_M[0])}: it has 0..{vocab_size - 1}; "
            "is the tokenizer of another model?"
        )


def _check_values(batch: TrainBatch, num_tokens: int) -> None:
    lengths_B = batch["lengths"]
    if lengths_B.numel() and (int(lengths_B.min()) < 1 or int(lengths_B.max()) > num_tokens):
        raise BatchError(f"`lengths` must lie in 1..{num_tokens}, got {lengths_B.tolist()}")
    position_T = torch.arange(num_tokens, device=lengths_B.device)
    outside_BT = (position_T[None] >= lengths_B[:, None]) | (position_T[None] == 0)
    if bool((batch["loss_mask"] & outside_BT).any()):
        raise BatchError(
            "`loss_mask` is set at position 0 or in the padding; no log-probability exists there"
        )
    if "temperature" in batch and not bool((batch["temperature"] > 0).all()):
        raise BatchError(
            f"`temperature` must be more than 0, logits are divided by it; got {batch['temperature'].tolist()}"
        )
