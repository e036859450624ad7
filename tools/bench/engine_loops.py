"""The two sides of the engine bench: the engine, and the loops a person would write with torch and transformers alone."""

# transformers and FSDP are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

import torch

from offbeat_engine import (
    Dtype,
    Fsdp2Config,
    ModelConfig,
    OptimizerConfig,
    SftLoss,
    World,
    train_batch,
)
from offbeat_engine.fsdp2 import Fsdp2Engine

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat_engine import TrainBatch

# B = sequences of this rank, T = tokens, V = vocabulary.

LR = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The model (Qwen2's shape) and the batch of one step, of each rank."""

    hidden: int = 384
    layers: int = 4
    intermediate: int = 1536
    heads: int = 6
    vocab: int = 4096
    sequences: int = 32
    tokens: int = 128
    micro_batch_tokens: int = 2048
    rounds: int = 7
    dtype: str = "float32"
    device: str = "cpu"
    scale: int = 1  # what the sizes of the large model and of the log-probs' vocabulary are divided by


class Side(Protocol):
    """Something that trains on a batch."""

    def step(self, batch: TrainBatch) -> None:
        """Make one optimizer step."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Tokens per second of both sides (medians), and the median of the ratios of neighbouring steps."""

    ours: float
    theirs: float
    of_neighbours: float

    @property
    def ratio(self) -> float:
        """Ours over theirs."""
        return self.ours / self.theirs


def take_turns(ours: Side, theirs: Side, batch: TrainBatch, rounds: int) -> Turns:
    """Let both step on `batch` alternately, `rounds` times after two that do not count."""
    tokens = int(batch["lengths"].sum())
    pairs: list[tuple[float, float]] = []
    for number in range(rounds + 2):
        sides = (ours, theirs) if number % 2 else (theirs, ours)  # neither is always the second
        took = {side: seconds_of(side, batch) for side in sides}
        pairs.append((took[ours], took[theirs]))
    pairs = pairs[2:]
    return Turns(
        ours=tokens / median(a for a, _ in pairs),
        theirs=tokens / median(b for _, b in pairs),
        of_neighbours=median(b / a for a, b in pairs),
    )


def seconds_of(side: Side, batch: TrainBatch) -> float:
    """Return what a step of `side` takes, to its end on the device."""
    started = time.perf_counter()
    side.step(batch)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def make_model(folder: Path, size: Size) -> str:
    """Write a random model of `size` and return its folder."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        intermediate_size=size.intermediate,
        num_attention_heads=size.heads,
        num_key_value_heads=max(1, size.heads // 3),
        vocab_size=size.vocab,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def batch_of(size: Size, lengths: list[int]) -> TrainBatch:
    """Return random sequences of `lengths`, all of each trained but its first token."""
    lengths_B = torch.tensor(lengths)
    position_T = torch.arange(max(lengths))
    real_BT = position_T[None] < lengths_B[:, None]
    ids_BT = torch.randint(0, size.vocab, real_BT.shape, generator=torch.Generator().manual_seed(1))
    return train_batch(
        input_ids=torch.where(real_BT, ids_BT, 0),
        lengths=lengths_B,
        loss_mask=real_BT & (position_T[None] > 0),
    )


class EngineSide:
    """One rank of the FSDP2 engine."""

    def __init__(self, engine: Any) -> None:  # noqa: ANN401
        self.engine = engine

    def step(self, batch: TrainBatch) -> None:
        """Make one optimizer step."""
        with self.engine.train_mode():
            self.engine.optimizer_zero_grad()
            self.engine.forward_backward_step(batch)
            self.engine.optimizer_step()


def engine_on(world: World, model: str, size: Size, **settings: Any) -> EngineSide:  # noqa: ANN401
    """Return an initialised engine of this rank."""
    config = Fsdp2Config(
        model=ModelConfig(path=model),
        optimizer=OptimizerConfig(lr=LR),
        dtype=Dtype(size.dtype),
        device="cuda" if size.device == "cuda" else "cpu",
        micro_batch_tokens=size.micro_batch_tokens,
        **settings,
    )
    engine = Fsdp2Engine(config, world)
    engine.init_model()
    engine.set_loss_fn(SftLoss())
    return EngineSide(engine)


class Plain:
    """Forward with logits, log-softmax, backward, clip, AdamW: on padded micro-batches of equal size, one rank."""

    def __init__(self, model: str, size: Size) -> None:
        from transformers import AutoModelForCausalLM

        self.size = size
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="sdpa"
        )
        self.model: Any = self.prepared(loaded.to(size.device)).train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def prepared(self, model: Any) -> Any:  # noqa: ANN401
        """Do to the model what must be done before the optimizer is made."""
        return model

    def step(self, batch: TrainBatch) -> None:
        """Make one optimizer step."""
        self.optimizer.zero_grad()
        ids_BT, mask_BT = batch["input_ids"].to(self.size.device), batch["loss_mask"].to(self.size.device)
        num_tokens = int(mask_BT.sum())
        rows = max(1, self.size.micro_batch_tokens // ids_BT.shape[1])
        bf16 = torch.autocast(self.size.device, torch.bfloat16, enabled=self.size.dtype == "bfloat16")
        for start in range(0, len(ids_BT), rows):
            ids_bT, mask_bT = ids_BT[start : start + rows], mask_BT[start : start + rows]
            with bf16:
                logits_bTV = self.model(ids_bT, use_cache=False).logits[:, :-1]
            logprobs = -torch.nn.functional.cross_entropy(
                logits_bTV.float().flatten(0, 1), ids_bT[:, 1:].flatten(), reduction="none"
            )
            (-(logprobs * mask_bT[:, 1:].flatten()).sum() / num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


class BareShards(Plain):
    """The same with `fully_shard` on the model alone, which is the quickest choice for one of this size."""

    def prepared(self, model: Any) -> Any:  # noqa: ANN401
        """Shard."""
        from torch.distributed.fsdp import fully_shard

        return fully_shard(model, reshard_after_forward=False)
