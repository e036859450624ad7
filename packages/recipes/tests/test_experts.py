"""Runs that replay the experts that their sampler's routers chose, and plans of them."""

import json
from dataclasses import replace

import pytest
from transformers import Qwen3MoeConfig

from offbeat_engine.fsdp2 import Fsdp2Engine
from offbeat_recipes.cli._hydra import compose_run
from offbeat_recipes.planning import plan
from offbeat_recipes.planning.facts import gather_facts
from offbeat_recipes.planning.plan import plan_run
from offbeat_recipes.tasks.arithmetic import ALPHABET
from offbeat_recipes.tasks.chars import char_tokenizer
from offbeat_recipes.testing import Command

RUN_TIMEOUT_S = 880.0
RECORDING = ("engine=megatron", "rollout=hf", "rollout.record_experts=true")
LAYERS, TOP_K = 2, 2
SMALL = (
    "task=arithmetic", "warmup.steps=2", "warmup.batch_size=8", "trainer.steps=2", "trainer.prompts_per_step=4", "trainer.group_size=4",
    "trainer.validation_prompts=4", "trainer.validate_every=0", "sampling.max_tokens=12",
)  # fmt: skip


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    """A mixture of experts that reads the task's characters, without weights: `model.random_init` draws them."""
    folder = tmp_path_factory.mktemp("mixture")
    tokenizer = char_tokenizer(ALPHABET)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, initializer_range=0.05, num_experts=4,
        num_experts_per_tok=TOP_K, moe_intermediate_size=64, norm_topk_prob=True, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, dtype="float32",
    )  # fmt: skip
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def of(shape, *settings):
    return (*settings, f"model.path={shape}", "model.random_init=true")


def planned(*settings):
    config = compose_run(settings)
    return plan_run(config, gather_facts(config))


def refused(plan):
    return {one.setting: one.reason for one in plan.refusals}


def test_the_plan_counts_them(shape):
    batch = ("trainer.prompts_per_step=4", "trainer.group_size=8", "engine.num_ranks=2")
    plan = planned(*of(shape, *RECORDING, *batch))
    assert plan.refusals == ()
    (found,) = [one for one in plan.memory if "experts of" in one.items[0][0]]
    tokens = 4 * 8 * plan.batch.max_tokens_per_sequence
    assert (found.num, found.total) == (3, tokens * LAYERS * TOP_K * 2)
    assert plan.batch.max_tokens_per_step == tokens
    silent = planned(*of(shape, *RECORDING[:2], *batch))
    assert not [one for one in silent.memory if "experts of" in one.items[0][0]]
    (note,) = [
        one
        for one in planned(
            *of(shape, *RECORDING, *batch, "cluster.object_store_mib=80", "trainer.prompts_per_step=20000")
        ).warnings
        if "object store" in one
    ]
    tokens = 20000 * 8 * plan.batch.max_tokens_per_sequence
    assert f"may take {tokens * (25 + 2 * LAYERS * TOP_K) / 2**20:.0f} MiB" in note


class Choosing(Fsdp2Engine):
    """Lets its routers choose, and says so."""

    @classmethod
    def capabilities(cls):
        plain = super().capabilities()
        own = {"routed_experts": "its routers have a mind of their own"}
        return replace(plain, features=plain.features - {*own}, missing={**plain.missing, **own})


def test_who_cannot_record_or_replay_is_refused(shape, monkeypatch):
    on_gpus = of(shape, "rollout=vllm", "device=cuda", RECORDING[2])
    assert (
        "`record_experts` on device 'cuda': vLLM 0.32 records them" in refused(planned(*on_gpus))["rollout"]
    )
    for adapter in ("hf", "vllm"):
        assert not refused(planned(*of(shape, f"rollout={adapter}", RECORDING[2])))
    for engine in ("fsdp2", "megatron"):
        assert not refused(planned(*of(shape, *RECORDING[1:], f"engine={engine}")))
    compiled = refused(planned(*of(shape, *RECORDING[1:], "engine.compile=true")))
    assert compiled["engine.compile"] == "compiled layers choose experts themselves"
    monkeypatch.setattr(plan, "engine_class", lambda name: Choosing)
    reason = refused(planned(*of(shape, *RECORDING)))["rollout.record_experts"]
    assert reason == "the engine megatron does not replay them: its routers have a mind of their own"


def test_a_model_without_experts_has_none_to_record():
    assert "no experts" in refused(planned(*RECORDING))["rollout.record_experts"]
    assert planned(*RECORDING[:2]).refusals == ()


def history(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def ran(shape, shared_ray, folder, *settings):
    """Run to the end; return the metrics of each step."""
    words = [*of(shape, *settings), f"run_dir={folder}", shared_ray]
    Command("train", words, folder.with_name(f"{folder.name}-said") / "train").succeed(RUN_TIMEOUT_S)
    return history(folder)


def worst(lines):
    return max(line["mismatch/max_abs_logprob_diff"] for line in lines)


@pytest.mark.ray
@pytest.mark.spawns
@pytest.mark.timeout(900)
def test_a_run_trains_by_the_experts_that_sampled(shape, shared_ray, tmp_path):
    lines = ran(shape, shared_ray, tmp_path / "run", *SMALL, *RECORDING, "trainer.updates_per_step=2")
    assert [line["step"] for line in lines] == [1, 2]
    assert worst(lines) <= 1e-4


@pytest.mark.ray
@pytest.mark.deep
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("adapter", "engine"),
    [
        ("hf", "fsdp2"),
        pytest.param("vllm", "megatron", marks=pytest.mark.vllm),
        pytest.param("sglang", "fsdp2", marks=[pytest.mark.vllm, pytest.mark.sglang]),
    ],
)
def test_every_adapter_records_for_every_engine(shape, shared_ray, tmp_path, adapter, engine):
    lines = ran(
        shape, shared_ray, tmp_path / "run", *SMALL, f"rollout={adapter}", RECORDING[2], f"engine={engine}"
    )
    assert len(lines) == 2
    assert worst(lines) <= 1e-4


@pytest.mark.ray
@pytest.mark.deep
@pytest.mark.timeout(1800)
def test_a_critic_and_a_reference_beside_it_and_a_run_that_goes_on_in_the_background(
    shape, shared_ray, tmp_path
):
    """Neither of them is given experts of others; what waited in the journal has them still."""
    settings = [
        *SMALL, "engine=fsdp2", "rollout=hf", RECORDING[2], "engine.num_ranks=2", "algorithm=ppo", "algorithm.kl_coef=0.01",
        "algorithm.critic_engine=megatron", "mode=one_step_off", "trainer.updates_per_step=2", "trainer.save_every=1",
    ]  # fmt: skip
    settings.remove("trainer.steps=2")
    lines = ran(shape, shared_ray, tmp_path / "run", *settings, "trainer.steps=3")
    assert len(lines) == 3
    again = ran(shape, shared_ray, tmp_path / "run", *settings, "trainer.steps=5", "resume=auto")
    assert [line["step"] for line in again] == [1, 2, 3, 4, 5]
    assert again[0]["mismatch/max_abs_logprob_diff"] <= 1e-4, (
        "the first step trains tokens of its own weights"
    )
    assert "value/explained_variance" in again[-1]


@pytest.mark.ray
@pytest.mark.deep
@pytest.mark.timeout(1800)
def test_a_mixture_learns(shape, shared_ray, tmp_path):
    lines = ran(
        shape,
        shared_ray,
        tmp_path / "run",
        "task=arithmetic",
        *RECORDING,
        "warmup.steps=600",
        "trainer.steps=30",
    )
    # A token that the trained policy finds next to impossible is rounded more: 1.05e-4 on one kind of CPU.
    assert worst(lines) <= 3e-4
    assert max(line["mismatch/mean_abs_logprob_diff"] for line in lines) <= 1e-6
    assert lines[-1]["accuracy/validation"] >= 0.9
    rewards = [line["reward/mean"] for line in lines]
    assert sum(rewards[-3:]) / 3 >= 0.9
    assert sum(rewards[:3]) / 3 < 0.8
