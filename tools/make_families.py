"""Write docs/families.md: every causal family of the installed transformers, exact or refused, tried on a tiny model of it.

Run without arguments to write the page (minutes); with names of families to try those and print what came of them. A family
that is neither exact nor refused in a sentence ends it with 1.
"""

# transformers' configs and registries are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import logging
import re
import sys
import tempfile
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from offbeat_engine import ConfigError, Fsdp2Config, ModelConfig, TrainBatch, World
from offbeat_engine.fsdp2 import Fsdp2Engine
from offbeat_engine.testing import make_tiny_model, random_batch, reference_logprobs
from offbeat_engine.testing.models import is_computed
from offbeat_engine.testing.reference import load_reference

PAGE = Path(__file__).resolve().parent.parent / "docs" / "families.md"
TOLERANCE = 1e-5
MAX_PARAMETERS = 8_000_000  # more is no tiny model, and defaults of some families are billions

# Small sizes for what families call their parts; each takes those that it has.
SIZES: dict[str, Any] = {
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "num_heads", "mamba_num_heads"), 4
    ),
    **dict.fromkeys(
        ("num_experts_per_tok", "moe_topk", "num_hidden_layers", "num_layers", "n_layers", "n_layer"), 2
    ),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("linear_num_key_heads", "mamba_expand"), 2),
    **dict.fromkeys(
        ("encoder_attention_heads", "decoder_attention_heads", "linear_num_value_heads", "mamba_n_heads"), 4
    ),
    **dict.fromkeys(
        ("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "mamba_n_groups"), 1
    ),
    **dict.fromkeys(("n_groups", "zero_expert_num"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(
        ("rotary_dim", "linear_key_head_dim", "linear_value_head_dim", "mamba_d_state", "block_size"), 8
    ),
    **dict.fromkeys(("ssm_state_size", "chunk_size", "state_size", "mamba_chunk_size", "mamba_head_dim"), 8),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32
    ),
    **dict.fromkeys(
        ("d_model", "word_embed_proj_dim", "expert_ffn_hidden_size", "lru_width", "embedding_size"), 32
    ),
    **dict.fromkeys(
        ("ffn_dim", "d_ff", "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim", "mamba_d_ssm"), 64
    ),
    **dict.fromkeys(("sliding_window", "attention_window_size", "window_size"), 7),
    "qk_head_dim": 16,
    "mamba_d_head": 16,
    "linear_conv_kernel_dim": 3,
    "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": False,
}
_LATENT = {"num_key_value_heads": 4}  # attention with a latent has as many heads of keys as of queries
# What single families need beyond that, or what is tried of them beside their defaults (name: family and settings).
OVERRIDES: dict[str, dict[str, Any]] = {
    "mamba": {
        "initializer_range": 0.02
    },  # drawn as wide as by default, log-probs lie below -17, and rounding shows
    "youtu": {"initializer_range": 0.02},
    "mamba2": {"head_dim": 16, "expand": 2},
    "dbrx": {
        "tie_word_embeddings": False,
        "n_heads": 4,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 64},
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0,
        "intermediate_size": 64,
        "activation_sparsity_pattern": None,
    },
    "gemma4_text": {
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0,
    },
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "qk_dim_factor": 1.0},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "attn_layers": ["local"] * 2,
        "feed_forward_size": 64,
        "local_attn_chunk_length": 32,
    },
    "roc_bert": {
        "is_decoder": True,
        "pronunciation_vocab_size": 64,
        "pronunciation_embed_dim": 8,
        "shape_vocab_size": 64,
        "shape_embed_dim": 8,
    },
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere, scale 1": ("cohere", {"logit_scale": 1.0}),
    "falcon_h1, scaled head": ("falcon_h1", {"lm_head_multiplier": 0.3}),
    "gemma2 without caps": ("gemma2", {"final_logit_softcapping": None, "attn_logit_softcapping": None}),
    "gpt2 with dropout": ("gpt2", {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}),
    "granite, scaled logits": ("granite", {"logits_scaling": 8.0}),
    "llama, dynamic rope": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama, yarn": ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    "mistral, window": ("mistral", {"sliding_window": 5}),
    "phi3, longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [4.0] * 4,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "qwen3_moe, a dense layer": ("qwen3_moe", {"mlp_only_layers": [0]}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one family under one layout: `gap` in nats where it ran, `refusal` where it was refused."""

    gap: float | None = None
    refusal: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether every log-probability is that of the plain model."""
        return self.gap is not None and self.gap <= TOLERANCE

    def __str__(self) -> str:
        if self.gap is None:
            return self.refusal
        return "exact" if self.is_exact else f"WRONG by {self.gap:.2g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One family: its model class, and what came of it packed and padded; or why there is no tiny model of it."""

    family: str
    model: str = ""
    packed: Outcome | None = None
    padded: Outcome | None = None
    untried: str = ""

    @property
    def is_sound(self) -> bool:
        """Whether there is no third outcome."""
        return all(each is None or each.is_exact or bool(each.refusal) for each in (self.packed, self.padded))


class NoTinyModel(Exception):
    """A family of which no tiny model could be made here."""


def families() -> list[str]:
    """Return every causal family of the installed transformers, and what is tried beside their defaults."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS])


def batch() -> TrainBatch:
    """Return nine sequences of 8 to 24 tokens, four of which begin alike."""
    drawn = random_batch(9, min_tokens=8)
    drawn["input_ids"][1:4, :6] = drawn["input_ids"][0, :6]
    return drawn


def attempt(family: str, folder: Path) -> Row:
    """Make a tiny model of `family` in `folder` and hold the engine against it."""
    name, extra = VARIANTS.get(family, (family, {}))
    try:
        path = _tiny(name, extra, folder)
        reference = load_reference(path)
        expected = reference_logprobs(reference, batch())["logprobs"].detach()
    except NoTinyModel as error:
        return Row(family=family, untried=_plain(str(error)))
    except Exception as error:  # noqa: BLE001 whatever a family wants that it does not get here
        return Row(family=family, untried=_plain(f"transformers makes no model of these sizes: {error}"))
    packed = judge(Fsdp2Config(model=ModelConfig(path=path)), expected)
    padded = judge(Fsdp2Config(model=ModelConfig(path=path), packing=False), expected)
    if padded.gap is None and "attention: eager" in padded.refusal:
        eager = judge(Fsdp2Config(model=ModelConfig(path=path), packing=False, attention="eager"), expected)
        padded = eager if eager.gap is None else Outcome(gap=eager.gap)
    return Row(family=family, model=type(reference).__name__, packed=packed, padded=padded)


def judge(config: Fsdp2Config, expected: torch.Tensor) -> Outcome:
    """Return how far the engine is from `expected`, or why it refuses the model. What else it raises is not caught."""
    engine = Fsdp2Engine(config, World())
    try:
        engine.init_model()
    except ConfigError as error:
        return Outcome(refusal=_plain(str(error)))
    with engine.eval_mode():
        got, _ = engine.forward_backward_step(batch(), forward_only=True)
    return Outcome(gap=float((got["logprobs"] - expected).abs().nan_to_num(nan=torch.inf).max()))


def _tiny(family: str, extra: dict[str, Any], folder: Path) -> str:
    from transformers import AutoConfig, AutoModelForCausalLM

    default = AutoConfig.for_model(family)
    settings = {**_sizes(default.get_text_config()), **OVERRIDES.get(family, {}), **extra}
    settings = {key: value for key, value in settings.items() if not is_computed(type(default), key)}
    if default.get_text_config() is not default:
        raise NoTinyModel("a model of text and more; its text part is a family of its own")
    with torch.device("meta"):
        outer = {key: value for key, value in _outer(settings).items() if not is_computed(type(default), key)}
        full: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **outer))
    size = sum(param.numel() for param in full.parameters())
    if size > MAX_PARAMETERS:
        raise NoTinyModel(f"{size / 1e6:.0f} million parameters at the sizes that are set here")
    return make_tiny_model(folder / "model", family=family, **settings)


def _outer(settings: dict[str, Any]) -> dict[str, Any]:
    """Return what `make_tiny_model` makes of `settings`."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    sizes |= {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return {**sizes, **{key: value for key, value in settings.items() if key != "layers"}}


def _sizes(config: Any) -> dict[str, Any]:  # noqa: ANN401
    settings = {key: value for key, value in SIZES.items() if hasattr(config, key)}
    settings |= _LATENT if hasattr(config, "kv_lora_rank") else {}
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    if kinds:  # a layer of each kind
        count = max(2, len(kinds))
        settings |= {"layer_types": (kinds * 2)[:count], "layers": count, "num_hidden_layers": count}
    return settings


def _plain(text: str) -> str:
    """Return the first sentence of a refusal without the figures that differ from machine to machine."""
    line = " ".join(text.split()).replace("|", "/")
    line = re.sub(
        r"a probe token has .*?\)", "its log-probabilities are not those of Hugging Face's forward", line
    )
    line = re.sub(r"/\S*/(tmp|model)\S*", "the folder", line)
    return line if len(line) <= 260 else line[:257] + "..."


def page(rows: list[Row]) -> str:
    """Return the text of docs/families.md."""
    tried = [row for row in rows if not row.untried]
    packed = sum(row.packed is not None and row.packed.is_exact for row in tried)
    padded = sum(row.padded is not None and row.padded.is_exact for row in tried)
    lines = [
        "# Families of models",
        "",
        f"Written by `tools/make_families.py` with transformers {version('transformers')} and torch "
        f"{torch.__version__.partition('+')[0]}, on CPU in float32: a tiny model of every causal family, random weights, through",
        "the FSDP2 engine and through Hugging Face's own forward, one sequence at a time. *Exact* is a difference of at most",
        f"{TOLERANCE:g} nats in every log-probability; anything else is a sentence before the first step. There is no third",
        "outcome: what a family does that the engine does not know of is found by comparison when the model is built",
        "(`fsdp2/self_check.py`), for families that are not in this table and for code that comes with a model, too. It feeds a",
        "sequence of 200 tokens and one of 140 (less where the model or a micro-batch takes less): what reaches further back",
        "than 199 tokens is beyond it, but for a window that only a family's masks know: packed rows are refused where one is set.",
        "",
        f"Of {len(tried)} tried, {packed} are exact packed and {padded} padded (`engine.packing=false`, where need be with "
        "`engine.attention=eager`).",
        "",
        "| family | class | packed | padded |",
        "|---|---|---|---|",
        *(f"| {row.family} | `{row.model}` | {row.packed} | {row.padded} |" for row in tried),
        "",
        "## Not tried",
        "",
        "No tiny model of these could be made from a few sizes. The comparison decides when one is used.",
        "",
        *(f"- {row.family}: {row.untried}" for row in rows if row.untried),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Try families and write or print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="families to try and print; all, into the page, by default")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    rows: list[Row] = []
    for name in options.names or families():
        with tempfile.TemporaryDirectory() as folder:
            rows.append(attempt(name, Path(folder)))
        row = rows[-1]
        print(
            f"{name}: "
            + (f"not tried ({row.untried})" if row.untried else f"packed {row.packed}; padded {row.padded}"),
            flush=True,
        )
    if not options.names:
        PAGE.write_text(page(rows))
    wrong = [row.family for row in rows if not row.is_sound]
    if wrong:
        sys.exit(f"neither exact nor refused: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
