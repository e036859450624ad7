"""The Megatron engine through the conformance suite: what every engine is asked, and its own layouts."""

import pytest

from offbeat_engine.config import Feature
from offbeat_engine.megatron import MegatronEngine
from offbeat_engine.megatron.checks import TENSOR_SEQUENCE
from offbeat_engine.testing import conformance
from offbeat_engine.testing.models import Variant
from offbeat_engine.testing.runner import Tolerances

pytestmark = pytest.mark.spawns

DENSE = ("qwen2", "qwen2_untied", "llama", "llama_tied", "qwen3", "mistral")
MIXTURES = ("mixtral", "qwen3_moe")
TENSOR, PIPELINE, EXPERTS = Feature.TENSOR_PARALLEL, Feature.PIPELINE_PARALLEL, Feature.EXPERT_PARALLEL
CONTEXT, AGAIN = Feature.CONTEXT_PARALLEL, Feature.ACTIVATION_CHECKPOINTING


def layout(name, *features, num_ranks=2, families=None, **changes):
    return Variant(
        name=name,
        changes=changes,
        features=frozenset(features),
        exact=True,
        num_ranks=num_ranks,
        slow=num_ranks > 2,
        families=families,
    )


TENSOR_2 = {"tensor_parallel_size": 2, "families": DENSE}
PIPELINE_2 = {"pipeline_parallel_size": 2}
EXPERTS_2 = {"expert_parallel_size": 2, "families": MIXTURES}
GATHERED = {
    "tensor_parallel_size": 2,
    "sequence_parallel": True,
    "dispatcher": "allgather",
    "families": MIXTURES,
}
CONTEXT_2 = {"context_parallel_size": 2}
LAYOUTS = (
    layout("copies_2_whole_moments", distributed_optimizer=False),
    layout("tensor_2", TENSOR, **TENSOR_2),
    layout("tensor_2_sequence", TENSOR, TENSOR_SEQUENCE, sequence_parallel=True, **TENSOR_2),
    layout("tensor_2_again", TENSOR, AGAIN, activation_checkpointing=True, **TENSOR_2),
    layout("pipeline_2", PIPELINE, **PIPELINE_2),
    layout("pipeline_2_again", PIPELINE, AGAIN, activation_checkpointing=True, **PIPELINE_2),
    layout("attention_again", AGAIN, activation_checkpointing=True, recompute="attention"),
    layout("experts_2", EXPERTS, **EXPERTS_2),
    layout("experts_2_gathered", EXPERTS, dispatcher="allgather", **EXPERTS_2),
    layout("tensor_2_pipeline_2", TENSOR, PIPELINE, num_ranks=4, **TENSOR_2, **PIPELINE_2),
    layout("pipeline_2_copies_2", PIPELINE, num_ranks=4, **PIPELINE_2),
    layout("context_2", CONTEXT, **CONTEXT_2),
    layout("context_2_unpacked", CONTEXT, packing=False, **CONTEXT_2),
    layout("context_2_again", CONTEXT, AGAIN, activation_checkpointing=True, **CONTEXT_2),
    layout("context_2_whole_moments", CONTEXT, distributed_optimizer=False, **CONTEXT_2),
    layout("context_2_experts_2", CONTEXT, EXPERTS, **CONTEXT_2, **EXPERTS_2),
    layout("context_2_copies_2", CONTEXT, num_ranks=4, **CONTEXT_2),
    layout("tensor_2_context_2", TENSOR, CONTEXT, num_ranks=4, **TENSOR_2, **CONTEXT_2),
    layout("pipeline_2_context_2", PIPELINE, CONTEXT, num_ranks=4, **PIPELINE_2, **CONTEXT_2),
    layout(
        "tensor_2_sequence_context_2_of_mixtures",
        TENSOR,
        TENSOR_SEQUENCE,
        CONTEXT,
        num_ranks=4,
        **GATHERED,
        **CONTEXT_2,
    ),
    layout("context_4", CONTEXT, num_ranks=4, context_parallel_size=4),
    layout("tensor_2_sequence_of_mixtures", TENSOR, TENSOR_SEQUENCE, **GATHERED),
    layout("tensor_2_experts_2", TENSOR, EXPERTS, num_ranks=4, expert_parallel_size=2, **GATHERED),
    layout("pipeline_2_experts_2", PIPELINE, EXPERTS, num_ranks=4, **PIPELINE_2, **EXPERTS_2),
)
Suite = conformance(
    MegatronEngine,
    families=[*DENSE, *MIXTURES],
    crossed=["qwen3", "mixtral"],  # with every layout: heads that are normalised, and experts
    extra_variants=LAYOUTS,
    # megatron-core rounds before it adds a bias and after, so that gradients of Qwen2's biases lose half a digit more.
    tolerances=Tolerances(bfloat16=2.5),
    slow=pytest.mark.slow,
    deep=pytest.mark.deep,
)


class TestMegatron(Suite):
    """Each family on two ranks that share a tensor, and each layout once; the cross product is deep."""


USUAL = ("declaration", "qwen2_one_rank", "qwen2_two_ranks", "qwen2_values", "qwen2_frozen", "one_at_a_time")
USUAL += (
    "order_two_ranks",
    "accumulation_two_ranks",
    "manifest_mixtral",
    "export_qwen3_moe",
    "idle_rank_empty",
)
USUAL += (
    "routed_experts_mixtral",
    "routed_experts_refused",
    "bfloat16_qwen2_2",
    "bfloat16_masters",
    "inference_only_bfloat16_2",
)
USUAL += ("checkpoint_2_to_1", "checkpoint_1_to_2", "checkpoint_tensor_2_sequence", "checkpoint_background_1")
USUAL += tuple(f"{family}_tensor_2" for family in DENSE)
USUAL += ("qwen2_tensor_2_sequence", "qwen2_pipeline_2", "qwen2_untied_pipeline_2", "qwen2_tensor_2_again")
USUAL += ("checkpoint_context_2", "qwen2_context_2", "mistral_context_2", "qwen3_moe_context_2_experts_2")
USUAL += (
    "qwen3_moe_experts_2",
    "mixtral_experts_2_gathered",
    "mixtral_tensor_2_sequence_of_mixtures",
    "qwen3_tensor_2_sequence",
)
for name, case in [pair for pair in vars(Suite).items() if pair[0].startswith("test_")]:
    if not name.endswith(USUAL):
        setattr(Suite, name, pytest.mark.deep(case))
del Suite
