"""The plan as a table: settings and facts in, arithmetic and refusals out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offbeat_engine.config import Refusal
from offbeat_recipes.cli._hydra import compose_run
from offbeat_recipes.planning.facts import Facts, ModelFacts
from offbeat_recipes.planning.memory import GIB, file_memory, kv_bytes_per_token, rank_memory, replica_memory
from offbeat_recipes.planning.plan import Plan, plan_run

MODEL = ModelFacts(
    num_params=1_000_000,
    num_layers=2,
    hidden_size=64,
    vocab_size=32,
    num_kv_heads=2,
    head_dim=32,
    max_positions=256,
)
CPU = Facts(
    num_cores=2,
    num_gpus=0,
    gpu_gib=0,
    ram_gib=16,
    model=MODEL,
    max_prompt_tokens=6,
    num_train_prompts=1000,
    longest_answer_tokens=24,
)
GPUS = replace(CPU, num_gpus=4, gpu_gib=80)


def _plan(*settings: str, facts: Facts = CPU) -> Plan:
    return plan_run(compose_run(settings), facts)


def _refused(plan: Plan) -> list[str]:
    return [item.setting for item in plan.refusals]


def test_the_defaults_can_run_on_two_cores():
    plan = _plan()
    assert plan.refusals == ()
    assert plan.warnings == ()


def test_the_arithmetic_of_a_step():
    batch = _plan(
        "trainer.prompts_per_step=6",
        "trainer.group_size=4",
        "trainer.updates_per_step=3",
        "trainer.steps=10",
        "engine.num_ranks=2",
    ).batch
    assert (batch.completions_per_step, batch.sequences_per_update, batch.sequences_per_rank) == (24, 8, 4)
    assert (batch.max_tokens_per_sequence, batch.max_tokens_per_step) == (30, 720)
    assert (batch.optimizer_steps, batch.final_version, batch.completions_in_all) == (30, 11, 240)


def test_placement_names_every_process():
    names = [item.process for item in _plan("engine.num_ranks=2", "rollout.num_replicas=2").placement]
    assert names == [
        "driver",
        "training rank 0 (fsdp2)",
        "training rank 1 (fsdp2)",
        "replica 0 (vllm)",
        "replica 1 (vllm)",
    ]


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ([], []),
        (["engine.num_ranks=2", "rollout.num_replicas=2"], []),
        (["engine.num_ranks=3"], ["engine.num_ranks"]),
        (["rollout.num_replicas=3"], ["rollout.num_replicas"]),
        (["rollout.num_replicas=3", "cluster.num_devices=4"], []),
        (["rollout.num_replicas=2", "cluster.num_devices=1"], ["rollout.num_replicas"]),
        (["rollout.num_replicas=99", "cluster.ray_address=there:1"], []),
        (["trainer.group_size=1"], ["trainer.group_size"]),
        (["trainer.updates_per_step=3"], ["trainer.updates_per_step"]),
        (["trainer.updates_per_step=4"], []),
        (
            ["trainer.prompts_per_step=2", "trainer.group_size=2", "trainer.updates_per_step=4"],
            [],
        ),
        (
            [
                "trainer.prompts_per_step=2",
                "trainer.group_size=2",
                "trainer.updates_per_step=4",
                "engine.num_ranks=2",
            ],
            ["engine.num_ranks"],
        ),
        (["trainer.prompts_per_step=3", "trainer.group_size=3", "engine.num_ranks=2"], []),
        (["warmup.batch_size=1", "engine.num_ranks=2"], ["warmup.batch_size"]),
        (["warmup.batch_size=1", "warmup.steps=0", "engine.num_ranks=2"], []),
        (["trainer.steps=0"], ["trainer.steps"]),
        (["rollout.max_model_len=29"], ["rollout.max_model_len"]),
        (["rollout.max_model_len=30"], []),
        (["rollout.max_model_len=257"], ["rollout.max_model_len"]),
        (["sampling.temperature=0"], ["sampling.temperature"]),
        (["algorithm.dual_clip=0.5"], ["algorithm.dual_clip"]),
        (["algorithm.dual_clip=3"], []),
        (["algorithm.clip_low=1.5"], ["algorithm.clip_low"]),
        (["algorithm.correction_low=0"], ["algorithm.correction_low"]),
        (["algorithm.correction_high=0.5"], ["algorithm.correction_high"]),
        (["engine.lora.rank=4", "engine.lora.export=adapter"], []),
        (["engine.lora.rank=4", "engine.lora.export=adapter", "rollout=hf"], []),
        (["mode=fully_async", "mode.sync_every=9"], ["mode"]),
        (["sampling.stop=[x]"], []),
        (["sampling.stop=[x]", "mode=fully_async", "mode.partial=abort"], ["sampling.stop"]),
        (["sampling.stop=[x]", "mode=fully_async", "mode.partial=wait"], []),
        (["sync.transport=loopback"], ["sync.transport"]),
        (["sync=disk"], []),
        (["trainer.prompts_per_step=1001"], ["trainer.prompts_per_step"]),
        (["rollout.kv_cache_gib=100"], ["rollout.kv_cache_gib"]),
        (["rollout.kv_cache_gib=0.00001"], ["rollout.kv_cache_gib"]),
        (["device=cuda"], ["device"]),
    ],
)
def test_what_two_cores_refuse(settings: list[str], refused: list[str]):
    assert _refused(_plan(*settings)) == refused


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ([], []),
        (["engine.num_ranks=2", "rollout.num_replicas=2"], []),
        (["engine.num_ranks=2", "rollout.tensor_parallel_size=2"], []),
        (["engine.num_ranks=3", "rollout.num_replicas=2"], ["engine.num_ranks"]),
        (
            ["engine.num_ranks=1", "rollout.num_replicas=2", "rollout.tensor_parallel_size=2"],
            ["engine.num_ranks"],
        ),
    ],
)
def test_what_four_gpus_refuse(settings: list[str], refused: list[str]):
    assert _refused(_plan("device=cuda", *settings, facts=GPUS)) == refused


def test_models_too_large_for_the_gpus():
    huge = replace(GPUS, model=replace(MODEL, num_params=40_000_000_000))
    assert _refused(_plan("device=cuda", facts=huge)) == ["engine.num_ranks", "rollout.tensor_parallel_size"]
    halves = _plan("device=cuda", "model.dtype=bfloat16", "rollout.tensor_parallel_size=2", facts=huge)
    assert _refused(halves) == ["engine.num_ranks"]


def states_of(settings):
    memory = rank_memory(compose_run(settings), CPU, longest_tokens=40, sequences=4)
    return memory.certain, [name for name, _ in memory.items]


def test_what_is_not_trained_is_not_counted_as_certain():
    full, _ = states_of([])
    assert full == 16 * MODEL.num_params
    base, names = states_of(["engine.lora.rank=4", "model.dtype=bfloat16"])
    assert base == 2 * MODEL.num_params
    assert any(name.startswith("adapter with gradients") for name in names)
    frozen, names = states_of(["engine.freeze=[model.layers.0]"])
    assert frozen == 4 * MODEL.num_params
    assert "gradients, float32, sharded, at most" in names
    assert states_of(["engine.num_ranks=2"])[0] == full // 2
    assert states_of(["engine.num_ranks=2", "engine.shard_size=1"])[0] == full


def test_ranks_that_share_sequences_may_be_more_than_there_are_sequences():
    settings = [
        "trainer.prompts_per_step=1",
        "trainer.group_size=2",
        "trainer.updates_per_step=2",
        "warmup.steps=0",
    ]
    config = compose_run([*settings, "engine.num_ranks=2", "engine.sequence_parallel_size=2"])
    assert not [one for one in plan_run(config, CPU).refusals if one.setting == "engine.num_ranks"]
    config = compose_run([*settings, "engine.num_ranks=2"])
    assert [one for one in plan_run(config, CPU).refusals if one.setting == "engine.num_ranks"]


def test_refusals_of_the_parts_come_first():
    part = Refusal(setting="engine.packing", reason="no", remedy="off")
    plan = _plan("trainer.group_size=1", facts=replace(CPU, refusals=(part,)))
    assert _refused(plan) == ["engine.packing", "trainer.group_size"]
    assert str(plan.refusals[0]) == "engine.packing: no; off"


def test_every_refusal_says_why_and_what_to_do():
    plan = _plan(
        "trainer.group_size=1", "rollout.num_replicas=3", "trainer.updates_per_step=3", "engine.num_ranks=3"
    )
    assert len(plan.refusals) == 4
    assert all(item.setting and item.reason and item.remedy for item in plan.refusals)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["sampling.max_tokens=23"], "cuts off right answers"),
        (["rollout.cpu_threads=2", "rollout.num_replicas=2"], "4 generating threads share 2 cores"),
        (["cluster.ray_address=there:1"], "are not counted"),
        (["warmup.steps=0"], "never right"),
        (["rollout.kv_cache_gib=15.9"], "memory may reach"),
    ],
)
def test_notes(settings: list[str], words: str):
    plan = _plan(*settings)
    assert plan.refusals == ()
    assert any(words in warning for warning in plan.warnings)


def test_memory_of_a_rank_by_hand():
    config = compose_run(
        ["engine.num_ranks=2", "sync.bucket_mib=1", "model.dtype=bfloat16", "algorithm.kl_coef=0.1"]
    )
    memory = rank_memory(config, CPU, longest_tokens=40, sequences=4)
    items = [num_bytes for _, num_bytes in memory.items]
    half = 500_000
    # master, gradients, moments, reference in bf16, bf16 copy, activations, five buckets
    assert items == [4 * half, 4 * half, 8 * half, 2 * half, 2_000_000, 160 * 64 * 34 * 2, 5 << 20]
    assert (memory.num, memory.certain, memory.total) == (2, 18 * half, sum(items))


def test_moments_of_eight_bits_take_two_bytes_and_their_scales():
    held, names = states_of(["engine.optimizer.name=adamw_8bit"])
    assert held == 8 * MODEL.num_params + 2 * MODEL.num_params + 8 * MODEL.num_params // 256
    assert "Adam's two moments, eight bits, sharded" in names


MIXTURE = replace(MODEL, num_params=1_000_000, num_expert_params=800_000)


def test_what_runs_elsewhere_is_held_against_the_memory_that_a_gpu_has_there():
    there = [
        "device=cuda",
        "cluster.ray_address=ray://head:10001",
        "cluster.num_devices=16",
        "engine.num_ranks=8",
    ]
    huge = replace(CPU, model=replace(MODEL, num_params=40_000_000_000))
    unknown = _plan(*there, facts=huge)
    assert not unknown.refusals
    assert any("cluster.device_memory_gib=80 does" in one for one in unknown.warnings)
    known = _plan(*there, facts=replace(huge, gpu_gib=24))
    assert "engine.num_ranks" in _refused(known)
    assert not any("device_memory_gib" in one for one in known.warnings)


EIGHT = replace(CPU, num_gpus=8, gpu_gib=80)


@pytest.mark.parametrize(
    ("layout", "facts", "weights", "moments"),
    [
        ((), MODEL, 1_000_000, 125_000),
        (("engine.distributed_optimizer=false",), MODEL, 1_000_000, 1_000_000),
        (("engine.tensor_parallel_size=2", "engine.pipeline_parallel_size=2"), MODEL, 250_000, 125_000),
        (("engine.tensor_parallel_size=4", "engine.pipeline_parallel_size=2"), MODEL, 125_000, 125_000),
        # Ranks that share sequences have the same weights each, and moments of their own.
        (("engine.tensor_parallel_size=2", "engine.context_parallel_size=4"), MODEL, 500_000, 125_000),
        # What is no expert lies on tensor x pipeline ranks, an expert on those times the ranks that share experts.
        (("engine.expert_parallel_size=4",), MIXTURE, 200_000 + 200_000, 125_000),
        (("engine.tensor_parallel_size=2", "engine.expert_parallel_size=2"), MIXTURE, 100_000 + 200_000, 125_000),
        (
            ("engine.expert_parallel_size=4", "engine.distributed_optimizer=false"),
            MIXTURE,
            200_000 + 200_000,
            200_000 + 200_000,
        ),
    ],
)  # fmt: skip
def test_memory_by_tensors_pipelines_and_experts(
    layout: tuple[str, ...], facts: ModelFacts, weights: int, moments: int
):
    config = compose_run(["engine=megatron", "engine.num_ranks=8", "device=cuda", *layout])
    items = dict(rank_memory(config, replace(EIGHT, model=facts), 30, 8).items)
    assert items["master weights, float32, sharded"] == 4 * weights
    assert items["gradients, float32, sharded"] == 4 * weights
    assert items["Adam's two moments, float32, sharded"] == 8 * moments


@pytest.mark.parametrize(
    ("experts", "hidden", "optimizer", "held"),
    [
        (64, 64, "adamw", 800_000 // 16),
        (8, 64, "adamw", 800_000 // 16),  # each is cut along its width
        (8, 24, "adamw", 800_000 // 8),  # which does not come out even: half of the ranks hold one each
        (20, 24, "adamw", 800_000 // 10),
        (8, 64, "adamw_8bit", 800_000 // 8),
    ],
)
def test_a_rank_that_holds_most_of_the_experts_is_counted(
    experts: int, hidden: int, optimizer: str, held: int
):
    settings = ["engine.num_ranks=16", "device=cuda", f"engine.optimizer.name={optimizer}"]
    model = replace(MIXTURE, num_experts=experts, hidden_size=hidden)
    items = dict(
        rank_memory(compose_run(settings), replace(CPU, num_gpus=16, gpu_gib=80, model=model), 30, 8).items
    )
    assert items["master weights, float32, sharded"] == 4 * (200_000 // 16 + held)
    moments = [size for name, size in items.items() if name.startswith("Adam's two moments")]
    assert moments[0] >= (8 if optimizer == "adamw" else 2) * (200_000 // 16 + held)


def test_in_bfloat16_weights_lie_beside_masters_that_copies_share_out():
    config = compose_run(
        ["engine=megatron", "engine.num_ranks=8", "device=cuda", "model.dtype=bfloat16", "engine.tensor_parallel_size=2"]
    )  # fmt: skip
    items = dict(rank_memory(config, EIGHT, 30, 8).items)
    assert items["weights, bfloat16, sharded"] == 2 * 500_000
    assert items["gathered weights, bfloat16, at most"] == 2 * 2 * MODEL.vocab_size * MODEL.hidden_size
    assert items["master weights, float32, sharded"] == 4 * 125_000


def test_ranks_of_tensors_and_pipelines_share_their_rows():
    plan = _plan(
        "engine=megatron", "engine.num_ranks=8", "device=cuda", "cluster.placement=colocated",
        "engine.tensor_parallel_size=2", "engine.pipeline_parallel_size=2",
        "trainer.prompts_per_step=4", "trainer.group_size=4", "trainer.updates_per_step=1", facts=EIGHT,
    )  # fmt: skip
    assert plan.batch.sequences_per_rank == 8  # sixteen on two copies
    assert plan.refusals == ()


def test_a_policy_with_adapters_needs_no_memory_for_its_reference():
    held = states_of(["engine.lora.rank=4", "algorithm.kl_coef=0.1"])
    assert held == states_of(["engine.lora.rank=4"])
    assert "reference weights, float32, sharded" in states_of(["algorithm.kl_coef=0.1"])[1]


def test_a_critic_takes_what_a_second_trained_model_takes():
    held, names = states_of(["algorithm=ppo"])
    assert held == 2 * states_of([])[0]
    assert "critic: Adam's two moments, float32, sharded" in names


def test_activations_are_bounded_by_the_micro_batch_and_shrink_with_checkpointing():
    few = rank_memory(compose_run(["engine.micro_batch_tokens=80"]), CPU, longest_tokens=40, sequences=400)
    assert few.items[-2] == ("activations of 80 tokens, at most", 80 * 64 * 34 * 2 * 2)
    one = rank_memory(compose_run(["engine.micro_batch_tokens=10"]), CPU, longest_tokens=40, sequences=400)
    assert one.items[-2][0] == "activations of 40 tokens, at most"
    config = compose_run(["engine.activation_checkpointing=true", "engine.micro_batch_tokens=80"])
    assert rank_memory(config, CPU, 40, 400).items[-2][1] == 80 * 64 * 2 * (2 * 2 + 34)


@pytest.mark.parametrize(("interleaved", "more"), [(1, 1), (2, 5 / 4)])
def test_interleaved_stages_keep_more_activations(interleaved, more):
    """Two stages of two runs of layers begin five runs before one comes back, where all layers are four."""
    settings = ["engine=megatron", "engine.pipeline_parallel_size=2", "engine.micro_batch_tokens=80"]
    config = compose_run([*settings, f"engine.virtual_pipeline_size={interleaved}"])
    assert rank_memory(config, CPU, 40, 400).items[-2][1] == 80 * 64 * 34 * 2 * 2 * more


@pytest.mark.parametrize(
    ("layout", "tokens", "layer"),
    [
        (["tensor_parallel_size=4"], 80, 10 + 24 // 4),
        (
            ["tensor_parallel_size=4", "sequence_parallel=true"],
            80,
            34,
        ),  # a rank has as much again of more tokens
        (["pipeline_parallel_size=2"], 80, 34),  # half of the layers for two micro-batches
        (["context_parallel_size=2"], 80, 34),
    ],
)
def test_activations_by_layouts_of_megatron(layout: list[str], tokens: int, layer: int):
    settings = ["engine=megatron", *(f"engine.{one}" for one in layout)]
    config = compose_run([*settings, "engine.micro_batch_tokens=80"])
    said = f"activations of {tokens} tokens, at most"
    assert rank_memory(config, CPU, 40, 400).items[-2] == (said, tokens * 64 * layer * 2 * 2)


@pytest.mark.parametrize(
    "sharing", ["context_parallel_size=4", "tensor_parallel_size=4 sequence_parallel=true"]
)
def test_ranks_share_out_a_sequence_that_is_longer_than_their_budget(sharing: str):
    settings = [
        "engine=megatron",
        *(f"engine.{one}" for one in sharing.split()),
        "engine.micro_batch_tokens=4",
    ]
    assert (
        rank_memory(compose_run(settings), CPU, 40, 400).items[-2][0] == "activations of 10 tokens, at most"
    )


def test_memory_of_a_replica_by_hand():
    cpu = replica_memory(compose_run(["rollout.kv_cache_gib=2"]), MODEL, gpu_gib=0)
    assert [num_bytes for _, num_bytes in cpu.items] == [4_000_000, 2 * GIB, 4_000_000]
    config = compose_run(["device=cuda", "rollout.tensor_parallel_size=2", "rollout.gpu_memory_fraction=0.5"])
    gpu = replica_memory(config, MODEL, gpu_gib=80)
    assert gpu.num == 2
    assert [num_bytes for _, num_bytes in gpu.items] == [2_000_000, 40 * GIB - 2_000_000, 4_000_000]
    assert kv_bytes_per_token(config, MODEL) == 2 * 2 * 2 * 32 * 4


def test_memory_of_an_sglang_replica_by_hand():
    """What drives a server holds new weights once for all its devices, and the file twice."""
    ranks = replica_memory(
        compose_run(["rollout=sglang", "rollout.tensor_parallel_size=2"]), MODEL, gpu_gib=0
    )
    assert ranks.num == 2
    assert [num_bytes for _, num_bytes in ranks.items] == [2_000_000, GIB, 2_000_000, 4_000_000]
    config = compose_run(["rollout=sglang", "device=cuda", "rollout.gpu_memory_fraction=0.5"])
    gpu = replica_memory(config, MODEL, gpu_gib=80)
    assert [num_bytes for _, num_bytes in gpu.items] == [4_000_000, 40 * GIB - 4_000_000, 4_000_000]
    file = file_memory(config, CPU)
    assert file is not None
    assert (file.num, file.total) == (1, 8_000_000)
    assert file_memory(compose_run(["device=cuda"]), CPU) is None


def test_a_role_with_a_folder_of_its_own_is_counted_by_its_own_size():
    settings = ["algorithm=ppo", "algorithm.critic_path=somewhere"]
    small = rank_memory(compose_run(settings), CPU, 40, 4)
    larger = replace(MODEL, num_params=10 * MODEL.num_params)
    large = rank_memory(compose_run(settings), replace(CPU, role_models={"critic": larger}), 40, 4)
    of_critic = [dict(one.items)["critic: master weights, float32, sharded"] for one in (small, large)]
    assert of_critic == [4_000_000, 40_000_000]
    assert large.certain == small.certain + 9 * 1_000_000 * 4 * 4  # weights, gradients, two moments


def test_a_batch_that_the_object_store_cannot_hold_is_told_with_what_would():
    settings = ["trainer.prompts_per_step=4096", "trainer.group_size=64", "cluster.object_store_mib=128"]
    facts = replace(CPU, num_train_prompts=10_000)
    (said,) = [one for one in _plan(*settings, facts=facts).warnings if "object store" in one]
    assert (
        "may take 188 MiB, and the object store has 128" in said
    )  # 25 bytes for each of 4096 x 64 x 30 tokens
    assert said.endswith("cluster.object_store_mib=188")
    assert not [one for one in _plan(*settings[:2], facts=facts).warnings if "object store" in one]
    elsewhere = _plan(*settings, "cluster.ray_address=head:6379", facts=facts)
    assert not [one for one in elsewhere.warnings if "object store" in one]


def test_weights_that_every_rank_loads_whole_are_counted_in_host_memory():
    settings = ["device=cuda", "model.dtype=bfloat16", "engine.num_ranks=2"]
    large = replace(MODEL, num_params=2_000_000_000)  # 16 GB for two ranks
    facts = replace(GPUS, model=large, ram_gib=12)
    assert not [one for one in _plan(*settings, facts=facts).refusals if "safetensors" in one.reason]
    (refusal,) = _plan(*settings, facts=replace(facts, loads_whole=True)).refusals
    assert refusal.setting == "model.path"
    assert (
        "each of 2 ranks loads the whole model into host memory, 14.9 GiB together; this machine has 12.0"
        in refusal.reason
    )
    whole = rank_memory(compose_run([]), replace(CPU, loads_whole=True), 40, 4)
    assert whole.total == rank_memory(compose_run([]), CPU, 40, 4).total  # one rank has it all anyway
    two = compose_run(["engine.num_ranks=2"])
    assert (
        rank_memory(two, replace(CPU, loads_whole=True), 40, 4).total
        == rank_memory(two, CPU, 40, 4).total + 2_000_000
    )


def test_new_weights_are_counted_where_they_are_staged():
    """Beside what a replica takes of its GPU while they fit there, else once in the memory of the host; auto picks the same."""
    large = replace(MODEL, num_params=7_000_000_000)
    facts = replace(GPUS, model=large, ram_gib=2048)
    settings = ["device=cuda", "model.dtype=bfloat16", "engine.num_ranks=2", "rollout.num_replicas=2"]
    staged = 14_000_000_000

    def where(*more: str) -> tuple[list[str], int]:
        plan = _plan(*settings, *more, facts=facts)
        assert plan.refusals == ()
        found = [one for one in plan.memory if ("new weights, staged until verified", staged) in one.items]
        return [f"{one.num} {one.process}" for one in found], sum(
            "host memory" in one for one in plan.warnings
        )

    assert where("rollout.gpu_memory_fraction=0.8") == (["2 replica"], 0)
    assert where("rollout.gpu_memory_fraction=0.85") == (["1 all replicas of a machine, in host memory"], 1)
    assert where("rollout.gpu_memory_fraction=0.85", "sync=broadcast") == (["2 replica"], 0)
