"""A low-rank adapter that is sent alone: checked by name and shape, put into a slot of vLLM's own LoRA layers.

The adapter is described by whoever starts the engine, under `additional_config["offbeat"]["adapter"]`; see the package.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# vLLM and transformers type their interfaces in part.

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from offbeat_ckptsync.ends.manifest import dtype_name, make_manifest, manifest_of
from offbeat_ckptsync.ends.sinks import owned_tensors
from offbeat_ckptsync.errors import ManifestError
from offbeat_ckptsync.seams import WeightSink
from offbeat_ckptsync.toolkit.threads import settle
from offbeat_ckptsync.transports.disk import folder_specs
from offbeat_ckptsync.values import Manifest, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import ModelConfig, VllmConfig
    from vllm.lora.lora_model import LoRAModel


# Parameters of routers that vLLM holds in float32, and which transformers does not list (afmoe, laguna, longcat_flash).
_ROUTERS = r"\.(expert_bias|e_score_correction_bias|router\.classifier\.weight)$"


def expected_manifest(model_config: ModelConfig) -> Manifest | None:
    """Return names and shapes of the checkpoint, floating tensors in the dtype that vLLM serves.

    Buffers, and the parameters that transformers keeps in float32, are expected in float32: vLLM computes with them in that (routers:
    rounded, they would choose other experts). None for a quantized model: its checkpoint does not hold what a trainer has. A tied
    output embedding is expected under the input embedding's name only, as `save_pretrained` writes it.
    """
    if model_config.quantization is not None:
        return None
    unrounded = _unrounded(model_config)

    def served(spec: TensorSpec) -> str:
        if not getattr(torch, spec.dtype).is_floating_point:
            return spec.dtype
        return "float32" if unrounded.search(spec.name) else dtype_name(model_config.dtype)

    folder = Path(model_config.model)
    specs = folder_specs(folder) if folder.is_dir() else ()
    if not specs:
        specs = manifest_of(owned_tensors(empty_model(model_config))).specs
    tied = bool(getattr(model_config.hf_config.get_text_config(), "tie_word_embeddings", False))
    return make_manifest(
        TensorSpec(name=spec.name, shape=spec.shape, dtype=served(spec))
        for spec in specs
        if not (tied and spec.name == "lm_head.weight")
    )


def empty_model(model_config: ModelConfig) -> torch.nn.Module:
    """Return the transformers model of this configuration, without weights."""
    import transformers

    architecture = getattr(transformers, next(iter(model_config.hf_config.architectures or ())))
    with torch.device("meta"):
        return cast("torch.nn.Module", architecture(model_config.hf_config))


def _unrounded(model_config: ModelConfig) -> re.Pattern[str]:
    """Return what matches the names of tensors that stay float32; of a family that transformers lacks, routers alone."""
    import transformers

    patterns = [_ROUTERS]
    if hasattr(transformers, next(iter(model_config.hf_config.architectures or ()), "")):
        model = empty_model(model_config)
        params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        patterns += [f"^{re.escape(name)}$" for name in {*model.state_dict()} - params]
        strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
        patterns += [pattern.replace("*", ".*") for pattern in strict]
    return re.compile("|".join(patterns))


_PREFIX = "base_model.model."  # as peft's adapter_model.safetensors has it
_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """One adapter: alpha / rank * B @ A over the weights of `targets`, served under vLLM's LoRA id `id`."""

    id: int
    rank: int
    alpha: float
    targets: tuple[str, ...]


def adapter_of(vllm_config: VllmConfig) -> AdapterSpec | None:
    """Return the adapter this engine was started for, or None.

    Raises:
        ManifestError: it is described otherwise than this package says, or LoRA is not enabled.
    """
    more: object = vllm_config.additional_config
    ours: object = cast("dict[str, object]", more).get("offbeat") if isinstance(more, dict) else None
    given: object = cast("dict[str, object]", ours).get("adapter") if isinstance(ours, dict) else None
    if given is None:
        return None
    try:
        fields = dict(cast("dict[str, Any]", given))
        fields["targets"] = tuple(fields["targets"])
        spec = AdapterSpec(**fields)
    except (TypeError, KeyError, ValueError) as error:
        raise ManifestError(
            f"additional_config['offbeat']['adapter'] is {given!r}; expected id, rank, alpha, targets"
        ) from error
    if vllm_config.lora_config is None:
        raise ManifestError("an adapter is to be served and LoRA is off; start the engine with `enable_lora`")
    return spec


class AdapterSink(WeightSink):
    """Puts A and B into the LoRA layers of a vLLM model.

    Everything that can be refused is refused before the old adapter is taken out: names, shapes, what vLLM makes of them.
    """

    def __init__(
        self, model: torch.nn.Module, vllm_config: VllmConfig, adapter: AdapterSpec, device: torch.device
    ) -> None:
        self._model = model
        self._device = device
        self._config = vllm_config
        self._adapter = adapter
        self._expected: Manifest | None = None

    def expected(self) -> Manifest:
        """Return A and B of every adapted layer, in the dtype being served.

        Raises:
            ManifestError: vLLM has no LoRA layer where one is to be adapted; names them.
        """
        if self._expected is None:
            layers = _adapted_layers(self._config.model_config, self._adapter)
            self._require_layers([*layers])
            self._expected = _manifest(layers, self._adapter.rank, self._config.model_config)
        return self._expected

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace the adapter; raises `ManifestError` before that where vLLM cannot read the new one."""
        # Copies: vLLM scales B in place, and what is staged is also what a peer may be sent.
        whole = {name: tensor.clone() for name, tensor in tensors}
        if not whole:
            raise ManifestError(f"version {version} has no tensors; nothing was changed")
        try:
            fresh = self._read(whole)
        except Exception as error:
            raise ManifestError(
                f"vLLM cannot read the adapter of version {version}: {error}; nothing was changed"
            ) from error
        manager = self._manager()
        manager.remove_adapter(fresh.id)
        manager.add_adapter(fresh)
        if not manager.activate_adapter(fresh.id):
            raise RuntimeError(f"adapter {fresh.id} was active while it was replaced")
        settle(self._device)

    def _read(self, whole: dict[str, torch.Tensor]) -> LoRAModel:
        """Do what vLLM's worker does with an adapter's files, from memory."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        lora_config = self._config.lora_config
        assert lora_config is not None
        adapter = self._adapter
        modules = sorted({_module_of(name).rpartition(".")[2] for name in whole})
        helper = PEFTHelper(
            r=adapter.rank,
            lora_alpha=adapter.alpha,  # pyright: ignore[reportArgumentType] -- annotated int, but a factor like any
            target_modules=modules,
        )
        helper.validate_legal(lora_config)
        return LoRAModel.from_lora_tensors(
            adapter.id,
            whole,
            helper,
            device="cpu",
            dtype=cast("torch.dtype", lora_config.lora_dtype),
            model_vocab_size=self._config.model_config.get_vocab_size(),
            weights_mapper=self._renames(),
            skip_prefixes=getattr(self._model, "lora_skip_prefixes", None),
        )

    def _require_layers(self, names: list[str]) -> None:
        from vllm.lora.utils import parse_fine_tuned_lora_name

        manager, renames = self._manager(), self._renames()
        there = {*manager.modules, *(part for parts in manager.packed_modules.values() for part in parts)}
        missing = [
            name
            for name in names
            if parse_fine_tuned_lora_name(f"{_PREFIX}{name}.lora_A.weight", renames)[0] not in there
        ]
        if missing:
            raise ManifestError(
                f"vLLM has no LoRA layer for {', '.join(missing[:_SHOWN])}"
                f"{f' and {len(missing) - _SHOWN} more' if len(missing) > _SHOWN else ''}; leave them out of the targets"
            )

    def _renames(self) -> Any:  # noqa: ANN401 -- vLLM's WeightsMapper, or None
        renames = getattr(self._model, "hf_to_vllm_mapper", None)
        return None if renames is None else renames.get_rename_mapper()

    def _manager(self) -> Any:  # noqa: ANN401 -- vLLM's LoRAModelManager
        return self._model.lora_manager


def _adapted_layers(model_config: ModelConfig, adapter: AdapterSpec) -> dict[str, torch.nn.Linear]:
    model: Any = empty_model(model_config)
    inside = {id(module) for module in model.base_model.modules()}
    chosen = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and id(module) in inside
        and (not adapter.targets or any(f".{name}".endswith(f".{target}") for target in adapter.targets))
    }
    if not chosen:
        raise ManifestError(f"no linear layer of the model is one of the adapter's targets {adapter.targets}")
    return chosen


def _manifest(layers: dict[str, torch.nn.Linear], rank: int, model_config: ModelConfig) -> Manifest:
    dtype = dtype_name(model_config.dtype)
    specs: list[TensorSpec] = []
    for name, layer in layers.items():
        for side, shape in (("A", (rank, layer.in_features)), ("B", (layer.out_features, rank))):
            specs.append(TensorSpec(name=f"{_PREFIX}{name}.lora_{side}.weight", shape=shape, dtype=dtype))
    return make_manifest(specs)


def _module_of(name: str) -> str:
    return name.removeprefix(_PREFIX).split(".lora_")[0]
