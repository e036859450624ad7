"""Before anything is trained: two short sequences through Hugging Face's own forward and through the engine's path."""

# transformers' models and configs are untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from offbeat_engine.batch import StepContext
from offbeat_engine.megatron import families
from offbeat_engine.megatron.loading import drawn, hf_config, is_drawn, source_of
from offbeat_engine.megatron.stepping import run_step
from offbeat_engine.toolkit.collectives import first_said, from_rank_zero
from offbeat_engine.toolkit.hf.probing import Judge, answers, find_non_finite, probe, without_bars

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat_engine.batch import TrainBatch
    from offbeat_engine.config import ModelConfig
    from offbeat_engine.megatron.build import Parts
    from offbeat_engine.megatron.config import MegatronConfig
    from offbeat_engine.megatron.loading import Held, Source
    from offbeat_engine.megatron.stepping import Step
    from offbeat_engine.toolkit.world import World


_FIRST = families.THEIRS_LAYER.format(layer=0)


def plain_forward(
    hf_config: Any,  # noqa: ANN401
    files: Source,
    model: ModelConfig,
    batch: TrainBatch,
    device: torch.device,
) -> torch.Tensor:
    """Return what Hugging Face's own code says of each sequence alone, float32 [B, T]: log-probabilities, or values.

    Models of one layer each, and one of none for embedding and head, are made of the folder's files by transformers itself:
    neither this engine's tables nor its layers have a part in them.
    """
    lengths = batch["lengths"].tolist()
    ids = [batch["input_ids"][row : row + 1, :length].to(device) for row, length in enumerate(lengths)]
    rows = torch.zeros(batch["input_ids"].shape)
    with torch.no_grad(), without_bars():
        ends = _model(hf_config, range(0), _of_ends(hf_config, files, model), model.head).to(device)
        states = [ends.get_input_embeddings()(ids_1T) for ids_1T in ids]
        for layer in range(hf_config.num_hidden_layers):
            one = _model(hf_config, range(layer, layer + 1), _of_layer(hf_config, files, layer), "lm")
            states = _through(one.to(device), states)
        for row, (ids_1T, states_1TH) in enumerate(zip(ids, states, strict=True)):
            logits_TV = ends(inputs_embeds=states_1TH).logits[0].float()
            rows[row, 1 : lengths[row]] = answers(logits_TV, ids_1T[0], model.head)
    return rows


def _through(one: Any, states: list[torch.Tensor]) -> list[torch.Tensor]:  # noqa: ANN401
    """Return what the one layer of a model makes of `states`, before the norm that follows the last layer."""
    found: list[torch.Tensor] = []

    def keep(_: object, __: object, output: Any) -> None:  # noqa: ANN401
        found.append(output[0] if isinstance(output, tuple) else output)

    one.model.layers[0].register_forward_hook(keep)
    for states_1TH in states:
        one(inputs_embeds=states_1TH)
    return found


def _model(hf_config: Any, layers: range, named: dict[str, torch.Tensor], head: str) -> Any:  # noqa: ANN401
    """Return a model of some of the layers, with weights `named` as the files name them."""
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    part = copy.deepcopy(hf_config)
    part.num_hidden_layers = len(layers)
    if getattr(part, "layer_types", None):
        part.layer_types = [part.layer_types[layer] for layer in layers]
    part.vocab_size = len(named[families.EMBEDDING.theirs[0]])
    part.pad_token_id = None  # which may lie beyond the vocabulary
    part.num_labels = 1
    auto: Any = AutoModelForTokenClassification if head == "value" else AutoModelForCausalLM
    kind = auto._model_mapping[type(part)]  # noqa: SLF001 `auto` itself takes nothing but a folder
    made = kind.from_pretrained(
        None, config=part, state_dict=named, attn_implementation="eager", dtype=torch.float32
    )
    return made.eval()


def _of_ends(hf_config: Any, files: Source, model: ModelConfig) -> dict[str, torch.Tensor]:  # noqa: ANN401
    shape = families.shape_of(hf_config, model.head)
    listed = [one for one in families.entries(shape, model.head) if one[1] is None]
    # A head beside the embedding that it is tied to: transformers says whether the two are one.
    head = families.HEAD.theirs[0]
    named = _read(files, [head] if model.head == "lm" and head in files.shapes else [])
    for entry, _, _ in listed:
        for name, whole in families.in_files(entry, None, None, shape).items():
            if is_drawn(name) and name not in files.shapes:
                named[name] = drawn(whole, model.seed, hf_config.initializer_range)
            else:
                named |= _read(files, [name])
    return named


def _of_layer(hf_config: Any, files: Source, layer: int) -> dict[str, torch.Tensor]:  # noqa: ANN401
    """Return the weights of one layer, called the first, and ends that are as small as can be."""
    prefix, hidden = families.THEIRS_LAYER.format(layer=layer), hf_config.hidden_size
    names = [name for name in files.shapes if name.startswith(prefix) and not name.endswith("inv_freq")]
    named = {_FIRST + name.removeprefix(prefix): one for name, one in _read(files, names).items()}
    named |= {entry.theirs[0]: torch.zeros(1, hidden) for entry in (families.EMBEDDING, families.HEAD)}
    return {**named, families.FINAL_NORM.theirs[0]: torch.ones(hidden)}


def _read(files: Source, names: list[str]) -> dict[str, torch.Tensor]:
    with files.opened(names) as read:
        return {name: read(name).float().clone() for name in names}


_UNPACKED = "set `packing: false`, with which they agree"
_WITHOUT_TE = "see whether they agree with `transformer_engine: false`"
_NOTHING_HELPS = "no setting of this engine makes them agree: use the engine `fsdp2`, or another model"


class Reference(TypedDict):
    """What Hugging Face's own forward makes of the two sequences, or why it failed; plain, so that it crosses ranks."""

    rows: list[list[float]]
    failed: str | None


def reference_of(config: MegatronConfig, device: torch.device, waits: World) -> Reference:
    """Compute it on rank 0, before anything else lies on its device; a collective of `waits`, as below."""
    mine = _plain(config, device) if waits.rank == 0 else Reference(rows=[], failed=None)
    return from_rank_zero(waits, mine)


def find_difference(step: Step, parts: Parts, waits: World, reference: Reference) -> str | None:
    """Return why this model must not be used here, the same on all ranks, or None; a collective.

    Args:
        step: a pass without a loss, in evaluation.
        parts: what was built.
        waits: a world with a deadline long enough for rank 0 to read the whole model, layer by layer.
        reference: what `reference_of` gave.
    """
    failure = first_said(waits, find_non_finite(_named(parts.held)))
    if failure is not None:
        return failure
    found = hf_config(step.config.model)
    batch = probe(found, step.config.micro_batch_tokens)
    if (failed := reference["failed"]) is not None:
        return f"{found.model_type}: Hugging Face's own forward failed on two short sequences ({failed})"
    plain_BT, judge = torch.tensor(reference["rows"]), Judge(step.config.dtype, batch["loss_mask"])
    difference = first_said(waits, _compared(step, parts, judge, plain_BT, batch))
    if difference is None:
        return None
    helps = False
    if step.config.packing:
        padded = replace(step, config=replace(step.config, packing=False))
        helps = first_said(waits, _compared(padded, parts, judge, plain_BT, batch)) is None
    remedy = _UNPACKED if helps else _NOTHING_HELPS
    if parts.with_te:
        remedy = f"{_WITHOUT_TE}; else {remedy}"
    return f"{found.model_type}: {difference}; {remedy}"


def _named(held: Sequence[Held]) -> list[tuple[str, torch.Tensor]]:
    return [
        (block.name, block.of(one.param) if one.param.dim() else one.param)
        for one in held
        for block in one.blocks
    ]


def _plain(config: MegatronConfig, device: torch.device) -> Reference:
    model = config.model
    try:
        with torch.random.fork_rng():
            found = hf_config(model)
            files = source_of(model, families.shape_of(found, model.head), found.initializer_range)
            batch = probe(found, config.micro_batch_tokens)
            rows = plain_forward(found, files, model, batch, device)
    except torch.OutOfMemoryError as error:
        why = f"one layer in float32, beside embedding and head, does not fit on {device}: {error}"
        return Reference(rows=[], failed=why)
    except Exception as error:  # noqa: BLE001 what rank 0 alone met becomes every rank's
        return Reference(rows=[], failed=f"{type(error).__name__}: {error}")
    return Reference(rows=rows.tolist(), failed=None)


def _compared(
    step: Step, parts: Parts, judge: Judge, plain_BT: torch.Tensor, batch: TrainBatch
) -> str | None:
    """Return both figures in words where this rank has outputs, and they differ; a collective."""
    with parts.groups.lent(), torch.no_grad():
        predictions = run_step(step, batch, StepContext())
    own_BT = predictions.get(step.request.names[0], None)
    return None if own_BT is None else judge.compare(plain_BT, own_BT.cpu())
