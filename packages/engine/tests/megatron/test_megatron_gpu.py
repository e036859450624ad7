"""What needs GPUs, of the Megatron engine: the suite, Transformer Engine's layers, context over NCCL, eight bits. Never run yet."""

from dataclasses import replace

import pytest

from offbeat_engine import Dtype, Fsdp2Config, engine_class
from offbeat_engine.megatron import MegatronEngine
from offbeat_engine.testing import conformance, probes
from offbeat_engine.testing.cases_features import check_bfloat16
from offbeat_engine.testing.cases_training import check_agreement
from offbeat_engine.testing.runner import BATCHES, KEPT, Options, Runner, Tolerances

pytestmark = pytest.mark.spawns

# As FSDP2's on a GPU, and with what megatron-core rounds beyond a plain model in bfloat16.
ON_A_GPU = Tolerances(
    logprob=1e-4, loss=1e-5, later_loss=1e-4, gradient=1e-3, norm=1e-4, step_weight=1e-2, bfloat16=2.5
)
# e5m2 has two bits after the point where bfloat16 has seven: it rounds 32 times as far.
IN_EIGHT_BITS = replace(ON_A_GPU, bfloat16=32 * ON_A_GPU.bfloat16)
FAMILIES = ("qwen2", "mistral", "qwen3_moe")

TestMegatronOnOneGpu = pytest.mark.gpu(1)(
    conformance(
        MegatronEngine, families=FAMILIES, device="cuda", num_ranks=1, slow=pytest.mark.slow, deep=pytest.mark.deep,
        tolerances=ON_A_GPU,
    )
)  # fmt: skip
# Layouts of several ranks are declared, and cannot be seen on one.
TestMegatronOnOneGpu.test_declaration = None


def make_runner(tolerances):
    return Runner(
        Options(engine=MegatronEngine, families=FAMILIES, num_ranks=2, device="cuda", tolerances=tolerances)
    )


@pytest.fixture(scope="module")
def runner():
    made = make_runner(ON_A_GPU)
    yield made
    made.close()


@pytest.fixture(params=[False, True], ids=["local", "transformer_engine"])
def with_te(request):
    if request.param:
        pytest.importorskip("transformer_engine", reason="Transformer Engine is not installed")
    return request.param


def trained(runner, num_ranks, family, **changes):
    job = runner.job(family, dtype=Dtype.BFLOAT16, **changes)
    records = runner.run(probes.train, num_ranks, job, BATCHES, KEPT)
    check_bfloat16(runner, records[0], job)
    check_agreement(records)
    return job, records[0]


# Of a mixture the suite's case `routed_experts_bfloat16` says it: left alone, a token may choose other experts, and no bound holds.
@pytest.mark.gpu(1)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "qwen3_moe"])
def test_bfloat16_strays_as_a_plain_model_does_and_as_fsdp2(runner, with_te, family):
    job, record = trained(runner, 1, family, transformer_engine=with_te)
    config = Fsdp2Config(
        model=job.config.model, optimizer=job.config.optimizer, dtype=Dtype.BFLOAT16, device="cuda",
        micro_batch_tokens=job.config.micro_batch_tokens,
    )  # fmt: skip
    other = replace(job, engine=engine_class("fsdp2"), config=config)
    theirs = runner.run(probes.train, 1, other, BATCHES, KEPT)[0]
    check_bfloat16(runner, theirs, other)
    for mine, one in zip(record.losses, theirs.losses, strict=True):
        assert mine == pytest.approx(one, rel=1e-2)


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    ("family", "te", "arguments"),
    [
        ("qwen2", False, {"bias_activation_fusion": True, "bias_dropout_fusion": True}),
        ("qwen2", True, {"apply_rope_fusion": True}),
        ("qwen3_moe", True, {"moe_permute_fusion": True, "moe_grouped_gemm": True}),
    ],
    ids=str,
)
def test_with_fused_kernels_bfloat16_strays_as_a_plain_model_does(runner, family, te, arguments):
    if te:
        pytest.importorskip("transformer_engine", reason="Transformer Engine is not installed")
    trained(runner, 1, family, transformer_engine=te, megatron_args=arguments)


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {"tensor_parallel_size": 2, "sequence_parallel": True}),
        ("qwen2", {"context_parallel_size": 2}),
        ("mistral", {"context_parallel_size": 2}),
        ("qwen3_moe", {"expert_parallel_size": 2}),
    ],
    ids=str,
)
def test_layouts_of_two_gpus(runner, with_te, family, changes):
    trained(runner, 2, family, transformer_engine=with_te, **changes)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("bits", ["e4m3", "hybrid"])
def test_eight_bits_stray_as_far_as_their_rounding(family, bits):
    pytest.importorskip("transformer_engine", reason="Transformer Engine is not installed")
    made = make_runner(IN_EIGHT_BITS)
    try:
        trained(made, 1, family, transformer_engine=bits)
    finally:
        made.close()
