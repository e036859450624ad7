"""The parts of the model that one rank holds, of megatron-core's local spec: built without values.

Experts that a sampler's routers chose, taken by this engine's in place of their own choice (arXiv 2510.11370).

How much each expert counts is still this router's own probability of it, so that gradients reach the router.
"""

# megatron-core and transformers' configs are untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportUnknownParameterType=false, reportUntypedBaseClass=false

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch

from offbeat_engine.megatron.config import OF_LAYERS, passed
from offbeat_engine.megatron.families import padded_vocab, vocab_rows
from offbeat_engine.megatron.layers import transformer_engine
from offbeat_engine.megatron.layers.context import Attention, RmsNorm, Rotary, SharedAttention
from offbeat_engine.toolkit.collectives import compute_dtype
from offbeat_engine.toolkit.step.logprobs import VocabShard, token_logprobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat_engine.megatron.config import MegatronConfig
    from offbeat_engine.megatron.families import Shape
    from offbeat_engine.megatron.groups import Groups
    from offbeat_engine.toolkit.hf.layouts import Layout


# S = tokens of a row on this rank, L = layers of the model, K = experts of a token, E = all experts.


class Replay:
    """What one router takes, row after row: in the place of megatron-core's `RouterReplay`, whose instances are global."""

    def __init__(self) -> None:
        self._now: torch.Tensor | None = None
        self._again: deque[torch.Tensor | None] = deque()

    def take(self, experts_SK: torch.Tensor | None, again: bool) -> None:
        """Take these in the forward pass that follows; None, or -1 for a token: the router's own.

        `again`: backward computes the layer a second time, row after row in the same order.
        """
        self._now = experts_SK
        if again:
            self._again.append(experts_SK)

    def forget(self) -> None:
        """Drop what a pass that failed has left."""
        self._now = None
        self._again.clear()

    def get_replay_topk(
        self,
        scores_SE: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and numbers of each token's experts, as megatron-core asks for them."""
        # What is computed again runs without gradients at first.
        later = bool(self._again) and torch.is_grad_enabled()
        experts_SK = self._again.popleft() if later else self._now
        own_SK, index_SK = choose(scores_SE, topk, num_groups=num_groups, group_topk=group_topk)
        if experts_SK is None:
            return own_SK, index_SK
        index_SK = torch.where(experts_SK < 0, index_SK, experts_SK.long())
        return scores_SE.gather(1, index_SK), index_SK


def install(chunk: Any) -> None:  # noqa: ANN401
    """Let the routers of a chunk of layers ask for what they are to take."""
    for _, router in _routers(chunk):
        router.router_replay = Replay()


def hand_over(chunk: Any, experts_SLK: torch.Tensor | None, again: bool) -> None:  # noqa: ANN401
    """Tell each router of `chunk` its experts for the row that comes next."""
    for layer, router in _routers(chunk):
        router.router_replay.take(None if experts_SLK is None else experts_SLK[:, layer], again)


def forget(chunk: Any) -> None:  # noqa: ANN401
    """Drop what is left of a step."""
    for _, router in _routers(chunk):
        router.router_replay.forget()


def _routers(chunk: Any) -> list[tuple[int, Any]]:  # noqa: ANN401
    layers = [layer for layer in chunk.decoder.layers if hasattr(layer.mlp, "router")]
    return [(int(layer.layer_number) - 1, layer.mlp.router) for layer in layers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A run of neighbouring layers on this rank, `model`, with what stands before and after them on the ends.

    `wrapped` is what the schedule runs: `model`, in megatron-core's data-parallel wrapper where it is trained.
    """

    model: Any
    wrapped: Any


def transformer_config(config: MegatronConfig, shape: Shape) -> Any:  # noqa: ANN401
    """Return megatron-core's own settings for a model of `shape`."""
    from megatron.core.transformer import TransformerConfig

    dtype = compute_dtype(config)
    made: Any = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        layernorm_epsilon=shape.norm_eps,
        add_qkv_bias=shape.family.qkv_bias,
        qk_layernorm=shape.family.qk_norm,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=config.device == "cpu",
        # The schedule divides by nothing: losses are divided by a global count already.
        calculate_per_token_loss=True,
        **_EVERY_MODEL,
        **_layout(config),
        **_recomputing(config),
        **transformer_engine.settings(config),
        **(_mixture(config, shape) if shape.num_experts else {}),
        **passed(config, OF_LAYERS),
    )
    made.offbeat_windows = shape.windows
    return made


_EVERY_MODEL: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "perform_initialization": False,  # values come from files
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
}


def _layout(config: MegatronConfig) -> dict[str, Any]:
    virtual = config.virtual_pipeline_size
    return {
        "tensor_model_parallel_size": config.tensor_parallel_size,
        "pipeline_model_parallel_size": config.pipeline_parallel_size,
        "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
        "sequence_parallel": config.sequence_parallel,
        "context_parallel_size": config.context_parallel_size,
        # With the default, interleaved stages on gloo take one another's messages where they are two, and say nothing.
        "batch_p2p_comm": False,
        "overlap_p2p_comm": virtual > 1,
        "deallocate_pipeline_outputs": False,
    }


def _mixture(config: MegatronConfig, shape: Shape) -> dict[str, Any]:
    return {
        "num_moe_experts": shape.num_experts,
        "expert_model_parallel_size": config.expert_parallel_size,
        "moe_ffn_hidden_size": shape.ffn,
        "moe_router_topk": shape.experts_per_token,
        "moe_router_pre_softmax": not shape.normalized_router,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": config.dispatcher,
    }


def _recomputing(config: MegatronConfig) -> dict[str, Any]:
    if not config.activation_checkpointing:
        return {}
    if config.recompute == "attention":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def build(
    config: MegatronConfig,
    shape: Shape,
    hf_config: Any,  # noqa: ANN401
    groups: Groups,
    with_te: bool,
) -> list[Any]:
    """Return this rank's chunks of the model, with memory for weights and no values yet.

    `with_te`: of Transformer Engine's layers.
    """
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )

    if not hasattr(moe_utils, "te_general_gemm"):  # routers ask for it, and only Transformer Engine brings it
        moe_utils.te_general_gemm = None  # pyright: ignore[reportAttributeAccessIssue]
    ours, rotary = transformer_config(config, shape), Rotary(hf_config)
    ours.offbeat_rotary_scaling = rotary.scaling
    if with_te:
        transformer_engine.set_windows(ours, shape.windows)
    norm: Any = RmsNorm
    chunks: list[Any] = []
    for number in range(config.virtual_pipeline_size):
        stage = number if config.virtual_pipeline_size > 1 else None
        num_layers = get_num_layers_to_build(ours, vp_stage=stage, pp_rank=groups.stage)
        block = TransformerBlockSubmodules(
            layer_specs=[_layer(config, shape, with_te)] * num_layers, layer_norm=norm
        )
        chunk = _model_class()(
            config=ours,
            transformer_layer_spec=block,
            vocab_size=padded_vocab(shape.vocab, config.tensor_parallel_size),
            max_sequence_length=hf_config.max_position_embeddings,
            pre_process=groups.stage == 0 and number == 0,
            post_process=groups.stage == groups.num_stages - 1 and number == config.virtual_pipeline_size - 1,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="rope",
            vp_stage=stage,
        )
        chunk.rotary_pos_emb = Rotary(hf_config)
        install(chunk)
        if chunk.post_process and config.model.head == "value":
            chunk.output_layer = None
            chunk.score = torch.nn.Linear(shape.hidden, 1, dtype=ours.params_dtype, device=_device(config))
        chunks.append(chunk)
    return chunks


def _device(config: MegatronConfig) -> torch.device:
    return (
        torch.device("cpu") if config.device == "cpu" else torch.device("cuda", torch.cuda.current_device())
    )


def _layer(config: MegatronConfig, shape: Shape, with_te: bool) -> Any:  # noqa: ANN401
    """Return the spec of a layer: megatron-core's own matrices and mixtures, with norms and attention of this package."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(
        num_experts=shape.num_experts or None,
        moe_grouped_gemm=False,
        qk_layernorm=shape.family.qk_norm,
        normalization="RMSNorm",
    )
    parts: Any = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RmsNorm
    attention = parts.self_attention.submodules
    attention.core_attention = _attention(config, shape, with_te)
    if shape.family.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    if with_te:
        transformer_engine.put_linears(spec, grouped=bool(config.megatron_args.get("moe_grouped_gemm")))
    return spec


def _attention(config: MegatronConfig, shape: Shape, with_te: bool) -> Any:  # noqa: ANN401
    if config.context_parallel_size == 1:
        return transformer_engine.PackedAttention if with_te else Attention
    # Its ring knows no windows.
    with_te = with_te and not any(shape.windows)
    return transformer_engine.PackedAttention if with_te else SharedAttention


def _model_class() -> Any:  # noqa: ANN401
    from megatron.core.models.gpt import GPTModel

    class Decoder(GPTModel):
        """A GPT model that ends with hidden states: what is asked of them, the head answers in chunks."""

        def _postprocess(self, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return hidden_states

    return Decoder


def predict(
    chunk: Any,  # noqa: ANN401
    states: torch.Tensor,
    layout: Layout,
    shape: Shape,
    groups: Groups,
    entropy_gradient: bool,
) -> tuple[torch.Tensor, ...]:
    """Return `(logprobs_M, entropy_M)`, or `(values_M,)` with a value head, of the last stage's hidden states; float32.

    All ranks of the tensor get the same. Their gradients of the states are parts with a language model's head, which they
    share, and each the whole with a value head.
    """
    from megatron.core import tensor_parallel

    score, group = getattr(chunk, "score", None), _tensor_group()
    if chunk.config.sequence_parallel:
        states = tensor_parallel.gather_from_sequence_parallel_region(
            states, tensor_parallel_output_grad=score is None, group=group
        )
    elif score is None:
        states = tensor_parallel.copy_to_tensor_model_parallel_region(states, group=group)
    hidden_MH = states.flatten(0, 1).index_select(0, layout.select_M)
    if score is not None:
        return (score(hidden_MH).float().squeeze(-1),)
    first, num_rows = vocab_rows(shape.vocab, groups.tensor)
    weight = chunk.shared_embedding_or_output_weight() if shape.tied else chunk.output_layer.weight
    head = SimpleNamespace(weight=weight[:num_rows], bias=None)
    shard = None if groups.tensor.size == 1 else VocabShard(first, group)
    return token_logprobs(
        hidden_MH, cast("Any", head), layout.targets_M, layout.temperature_M, entropy_gradient, shard
    )


def _tensor_group() -> Any:  # noqa: ANN401
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()
