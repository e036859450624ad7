"""Before anything is trained: two sequences, of up to 200 and 140 tokens, through Hugging Face's own forward and through the engine's path.

What a family does that the engine does not know of (a scaled logit, a layer that mixes tokens across packed sequences,
frequencies that follow the longest position, noise in training) shows here, whoever wrote the model.
"""

from __future__ import annotations

import logging
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from offbeat_engine.config import Dtype, require_config
from offbeat_engine.errors import RankLostError
from offbeat_engine.fsdp2 import families
from offbeat_engine.fsdp2.attention.packing import lay_out, padded_inputs
from offbeat_engine.fsdp2.attention.varlen import inputs_maker
from offbeat_engine.fsdp2.config import Fsdp2Config
from offbeat_engine.fsdp2.model.replay import Choices
from offbeat_engine.fsdp2.weights.export import local
from offbeat_engine.toolkit.collectives import gather_answers
from offbeat_engine.toolkit.hf import probing
from offbeat_engine.toolkit.hf.layouts import KEY
from offbeat_engine.toolkit.hf.probing import SHARED, Judge, answers, probe, sequence_limit

if TYPE_CHECKING:
    from collections.abc import Generator
    from contextlib import AbstractContextManager

    from offbeat_engine.batch import TrainBatch
    from offbeat_engine.fsdp2.build import EngineState
    from offbeat_engine.fsdp2.model.trainable import Scorer
    from offbeat_engine.interface import Engine
    from offbeat_engine.toolkit.hf.layouts import Layout

_log = logging.getLogger(__name__)
_UNPACKED = "its layers mix tokens of packed sequences: set `packing: false`, which is exact"
# Of a token's range of scores: in bfloat16 rounding came to 0.11 where dense models of such weights pass.
_NEAR_TIE = {Dtype.BFLOAT16: 0.25, Dtype.FLOAT32: 1e-5}
_NOTHING_HELPS = "no setting of this engine makes them agree: use another model or another engine"


def find_non_finite(hf: Any) -> str | None:
    """Return which weights of this rank's part of a model are no numbers, or None."""
    return probing.find_non_finite((name, local(weight)) for name, weight in hf.named_parameters())


def find_difference(engine: Engine, state: EngineState, *, packed: bool, dropout: bool) -> str | None:
    """Return why this model must not be used here, or None; a collective in which all ranks do the same.

    Args:
        engine: built and in no mode.
        state: what it was built of.
        packed: whether packing is on, so that turning it off may help.
        dropout: whether training may differ from evaluation, because dropout was asked for or nothing is trained.
    """
    scorer, hf = state.scorer, state.scorer.hf
    batch = probe(hf.config.get_text_config(), engine.config.micro_batch_tokens)
    name = "values" if scorer.head == "value" else "logprobs"
    device = next(scorer.parameters()).device
    judge = Judge(engine.config.dtype, batch["loss_mask"])
    with _random_state_kept(device), torch.compiler.set_stance("force_eager"):
        try:
            with engine.eval_mode():
                plain, found = _plain_unrounded(engine, scorer, batch, device)
                found = found or (None if dropout else _quieten(engine, scorer, plain, batch, device))
                if found is not None:
                    return found
                own = _own(engine, batch, name)
                found = _but_for_ties(engine, state, batch, judge, judge.compare(plain, own))
                found = found or _mixing(engine, batch, name)
                if found is not None:
                    helps = packed and judge.compare(plain, _padded(state, batch, device)) is None
                    return f"{type(hf).__name__}: {found}; {_UNPACKED if helps else _NOTHING_HELPS}"
                # The same shapes: where evaluation repeats itself bit for bit, noise has no rounding to hide behind.
                repeats = torch.equal(own, _own(engine, batch, name))
                if not _stays(engine, scorer, batch, device):
                    return (
                        f"{type(hf).__name__}: the log-probabilities of a sequence change with the positions of another "
                        "beside it; use a rope whose frequencies are fixed (`rope_type` default, linear, llama3 or yarn)"
                    )
            if not dropout:
                with engine.train_mode():
                    trained = _own(engine, batch, name)
                judge = Judge(
                    Dtype.FLOAT32 if repeats else engine.config.dtype, batch["loss_mask"], strict=True
                )
                found = judge.compare(own, trained, "evaluation", "training")
        except RankLostError:
            raise
        except Exception as error:  # noqa: BLE001 whatever a model raises here it would raise in the first step
            return _failure(hf, error, batch, engine.config.dtype, packed=packed)
    return found and (
        f"{type(hf).__name__}: {found}: something draws at random that no setting of its config turns off; "
        "set `model.dropout: true` if that is wanted"
    )


def _random_state_kept(device: torch.device) -> AbstractContextManager[None]:
    """Of the CPU and this rank's GPU: by itself torch takes that of every GPU of the host, and warns of it."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def _failure(hf: Any, error: Exception, batch: TrainBatch, dtype: Dtype, *, packed: bool) -> str:
    """Say in words what `error` has to do with the model: nothing, where memory ran out or a rank was lost."""
    what = f"{type(hf).__name__} failed on {batch.batch_size[0]} short sequences ({type(error).__name__}: {error}); "
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return (
            f"{what}memory ran out before anything was trained: more ranks, `offload_optimizer`, `offload_parameters`, or less "
            "beside it on the device"
        )
    if isinstance(error, dist.DistError) or "gloo/transport" in str(error):
        return f"{what}another rank died, hangs, or raised alone: see the logs of all of them"
    if dtype == Dtype.BFLOAT16 and isinstance(error, RuntimeError) and "dtype" in str(error):
        return f"{what}the family's own code computes a part in float32 and multiplies it by bfloat16 weights: set `dtype: float32`"
    return what + ("`packing: false` may help, or use another model" if packed else "use another model")


def _quieten(
    engine: Engine, scorer: Scorer, plain_BT: torch.Tensor, batch: TrainBatch, device: torch.device
) -> str | None:
    """Turn off what answers at random in training, and say so: with it the same weights would not repeat themselves.

    Returns why it cannot be turned off (a router may call a threshold its jitter), or None.
    """
    noise, family = families.Noise(scorer.hf), type(scorer.hf).__name__
    if not noise:
        return None
    said, judge = str(noise), Judge(engine.config.dtype, batch["loss_mask"], strict=True)
    for value in (0.5, 0.0):  # the first is large enough that evaluation shows it wherever it looks at it
        noise.set(value)
        if judge.compare(plain_BT, _plain(scorer, batch, device)) is not None:
            noise.restore()
            return (
                f"{family}: evaluation depends on what makes training random ({said}), so that cannot be turned off, and the "
                "same weights would answer differently in training; set `model.dropout: true` if that is wanted"
            )
    _log.warning(
        "dropout of %s is off (it comes with %s); `model.dropout: true` trains with it", family, said
    )
    return None


def _own(engine: Engine, batch: TrainBatch, name: str) -> torch.Tensor:
    predictions, _ = engine.forward_backward_step(batch, forward_only=True)
    return predictions[name].cpu()


def _mixing(engine: Engine, batch: TrainBatch, name: str) -> str | None:
    """Return in words how the shorter sequence changes with what the longer one says, or None if it does not.

    Both calls have the same shapes, so hardly anything is left to rounding, in bfloat16 either.
    """
    own, other = _own(engine, batch, name)[1:], batch.clone()
    other["input_ids"][0, SHARED:] = other["input_ids"][0, SHARED:].flip(0)
    judge = Judge(engine.config.dtype, batch["loss_mask"][1:], strict=True)
    return judge.compare(own, _own(engine, other, name)[1:], "itself", "itself beside another sequence")


def _plain(scorer: Scorer, batch: TrainBatch, device: torch.device) -> torch.Tensor:
    """Return what Hugging Face's own forward says of each sequence alone, float32 [B, T]."""
    rows = torch.zeros(batch["input_ids"].shape)
    with torch.no_grad(), _plain_attention(scorer.hf):
        for row, length in enumerate(batch["lengths"].tolist()):
            ids_1T = batch["input_ids"][row : row + 1, :length].to(device)
            rows[row, 1:length] = answers(scorer.plain(input_ids=ids_1T)[0], ids_1T[0], scorer.head)
    return rows


def _plain_unrounded(
    engine: Engine, scorer: Scorer, batch: TrainBatch, device: torch.device
) -> tuple[torch.Tensor, str | None]:
    """Return what `_plain` does; and which parameter it computes with in less than float32, in which transformers loads it."""
    dtype, hf = engine.config.dtype, scorer.hf
    patterns = hf._get_dtype_plan(getattr(torch, dtype))  # noqa: SLF001 it has no public name
    rounded: list[str] = []

    def look(module: torch.nn.Module, _: object) -> None:
        for name, param in module.named_parameters():
            full_name = f"{names[module]}.{name}"
            if any(re.search(pattern.replace("*", ".*"), full_name) for pattern in patterns):
                rounded.extend([full_name] * (param.dtype != torch.float32))

    names = {module: name for name, module in hf.named_modules()}
    holders = [module for module in names if patterns and [*module.parameters(recurse=False)]]
    handles = [module.register_forward_pre_hook(look) for module in holders]
    plain_BT = _plain(scorer, batch, device)
    for handle in handles:
        handle.remove()
    found = f"`{rounded[0]}` is in {dtype} in the forward pass and should be in float32" if rounded else None
    return plain_BT, found and f"{type(hf).__name__}: {found}, as transformers has it; set `dtype: float32`"


def _but_for_ties(
    engine: Engine, state: EngineState, batch: TrainBatch, judge: Judge, found: str | None
) -> str | None:
    """Return how the engine's path differs with the plain one's experts, or None: then `found` was of near ties that rounding decided."""
    if found is None:
        return None
    device = next(state.scorer.parameters()).device
    plain_BT, experts_BTK = _chosen(state.scorer, batch, device)
    if experts_BTK is None:
        return found
    batch = batch.copy()
    batch[KEY] = experts_BTK
    layout = lay_out(batch, inputs_maker(require_config(engine.config, Fsdp2Config)), device, state.peers)
    assert layout.experts_NK is not None
    with Choices(len(layout.experts_NK), layout.experts_NK, measures=True) as choices:
        own_BT = _laid_out(state, layout, batch)
    return found if choices.gap > _NEAR_TIE[engine.config.dtype] else judge.compare(plain_BT, own_BT)


def _chosen(
    scorer: Scorer, batch: TrainBatch, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what `_plain` does, and the experts that it takes [B, T, K], one choice after the other; None where it makes none."""
    rows: list[torch.Tensor] = []
    plain_BT = torch.zeros(batch["input_ids"].shape)
    for row in range(len(plain_BT)):
        with Choices(int(batch["lengths"][row])) as choices:
            plain_BT[row] = _plain(scorer, batch[row : row + 1], device)[0]
        if not choices.made:
            return plain_BT, None
        rows.append(torch.cat(choices.made, 1).cpu())
    return plain_BT, pad_sequence(rows, batch_first=True, padding_value=-1)


def _padded(state: EngineState, batch: TrainBatch, device: torch.device) -> torch.Tensor:
    """Return what the engine says without packing, float32 [B, T]."""
    with _plain_attention(state.scorer.hf):
        return _laid_out(state, lay_out(batch, padded_inputs, device), batch)


def _laid_out(state: EngineState, layout: Layout, batch: TrainBatch) -> torch.Tensor:
    """Return what the engine says of a layout of `batch`, float32 [B, T]."""
    flat = torch.zeros(batch["input_ids"].numel())
    with torch.no_grad():
        outputs = state.scorer(layout, False)
        if layout.counts_P:
            assert state.peers is not None
            outputs = gather_answers(outputs, layout.counts_P, state.peers.group, adds_up=True)
    flat[layout.place_M.cpu()] = outputs[0].float().cpu()
    return flat.view(batch["input_ids"].shape)


def _stays(engine: Engine, scorer: Scorer, batch: TrainBatch, device: torch.device) -> bool:
    """Return whether a sequence keeps its log-probabilities beside one at the far end of the model's positions."""
    length = int(batch["lengths"][0])
    config = scorer.hf.config.get_text_config()
    limit = sequence_limit(config) or getattr(config, "max_position_embeddings", None)
    if limit is None or limit <= length or not families.takes_positions(scorer.hf):
        return True
    ids_BT = batch["input_ids"][:1, :length].to(device).repeat(2, 1)
    near_T = torch.arange(length, device=device)
    far_T = near_T + (int(limit) - length)
    with torch.no_grad(), _plain_attention(scorer.hf):
        alone, beside = (
            answers(
                scorer.plain(input_ids=ids_BT, position_ids=torch.stack(positions))[0], ids_BT[0], scorer.head
            )
            for positions in ((near_T, near_T), (near_T, far_T))
        )
    judge = Judge(engine.config.dtype, torch.ones(length - 1, dtype=torch.bool), strict=True)
    return judge.compare(alone, beside) is None


@contextmanager
def _plain_attention(hf: Any) -> Generator[None]:
    """Let the model attend as transformers wrote it down, and as before after that."""
    before = hf.config._attn_implementation  # noqa: SLF001 it has no public name
    hf.set_attn_implementation("eager")
    try:
        yield
    finally:
        hf.set_attn_implementation(before)
