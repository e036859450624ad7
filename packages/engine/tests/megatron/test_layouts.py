"""Layouts that the suite's models are too small or too even for, and several engines in one process."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from offbeat_engine import (
    BatchError,
    ConfigError,
    Dtype,
    Fsdp2Config,
    ModelConfig,
    SftLoss,
    engine_class,
    plan_micro_batches,
)
from offbeat_engine.megatron import MegatronConfig, MegatronEngine
from offbeat_engine.megatron.groups import make_groups
from offbeat_engine.megatron.layers import model
from offbeat_engine.megatron.layers.context import Attention
from offbeat_engine.testing import make_tiny_model, probes, random_batch
from offbeat_engine.testing.cases_features import check_bfloat16, check_replay
from offbeat_engine.testing.cases_training import check_agreement, check_training
from offbeat_engine.testing.models import FAMILIES
from offbeat_engine.testing.probes import Job
from offbeat_engine.testing.reference import with_drawn_experts
from offbeat_engine.testing.runner import BATCHES, KEPT, STEPS, Options, Runner
from offbeat_engine.toolkit.hf.layouts import fed_lengths

pytestmark = pytest.mark.spawns
SEVERAL_LAYOUTS = [
    {"tensor_parallel_size": 2},
    pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.deep),
    pytest.param({"context_parallel_size": 2}, marks=pytest.mark.deep),
]
INTERLEAVED = {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2}


@contextmanager
def patched(module, name, value):
    kept = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, kept)


@pytest.fixture(scope="module")
def runner():
    made = Runner(
        Options(engine=MegatronEngine, families=("qwen2", "llama", "mixtral", "qwen3_moe"), num_ranks=2)
    )
    yield made
    made.close()


def job_on(runner, path, engine=MegatronEngine, **changes):
    job = runner.job("qwen2")
    return replace(
        job, engine=engine, config=replace(job.config, model=ModelConfig(path=str(path)), **changes)
    )


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "deep", layers=4)


@pytest.mark.deep
def test_interleaved_stages_train_as_the_plain_reference(runner, four_layers):
    job = job_on(runner, four_layers, micro_batch_tokens=8, **INTERLEAVED)
    records = runner.run(probes.train, 2, job, BATCHES, KEPT)
    check_training(runner, records[0], runner.reference(job))
    check_agreement(records)


class DefaultMessages(MegatronEngine):
    """Leaves megatron-core its default way to send between stages."""

    def init_model(self):
        made = model.transformer_config

        def with_default(*arguments):
            config = made(*arguments)
            config.batch_p2p_comm, config.overlap_p2p_comm = True, False
            return config

        with patched(model, "transformer_config", with_default):
            super().init_model()

    def _difference(self, parts, reference):
        return None  # it would see this


def test_with_the_default_messages_interleaved_stages_are_silently_wrong_on_gloo(runner, four_layers):
    """If this fails, gloo or megatron-core was mended: then `transformer_config` need not set it."""
    job = job_on(runner, four_layers, DefaultMessages, micro_batch_tokens=8, **INTERLEAVED)
    record = runner.run(probes.train, 2, job, BATCHES[:1])[0]
    expected = runner.reference(job).predictions["logprobs"]
    assert (record.predictions["logprobs"] - expected).abs().max() > 0.01


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64}
LONG |= {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 4.0, 6.0]}


@pytest.mark.parametrize(
    ("rope", "layout"),
    [
        (YARN, "tensor"),
        pytest.param(YARN, "context", marks=pytest.mark.deep),
        (LONG, "tensor"),
    ],
    ids=["yarn", "yarn_context", "longrope"],
)
def test_a_factor_on_cosine_and_sine_is_taken_by_attention(runner, tmp_path, rope, layout):
    path = make_tiny_model(tmp_path / "model", family="llama", rope_scaling=rope, max_position_embeddings=256)
    job = job_on(runner, path, **{f"{layout}_parallel_size": 2})
    records = runner.run(probes.train, 2, job, BATCHES, KEPT)
    check_training(runner, records[0], runner.reference(job))


@pytest.mark.parametrize(
    "changes",
    [
        {"tensor_parallel_size": 2},
        pytest.param({"tensor_parallel_size": 2, "sequence_parallel": True}, marks=pytest.mark.deep),
        pytest.param({}, marks=pytest.mark.deep),
    ],
    ids=["tensor_2", "tensor_2_sequence", "copies_2"],
)
def test_a_vocabulary_that_ranks_cannot_share_evenly_is_filled_up(runner, tmp_path, changes):
    path = make_tiny_model(tmp_path / "odd", vocab_size=65, tie_word_embeddings=False)
    job = job_on(runner, path, **changes)
    records = runner.run(probes.train, 2, job, BATCHES, KEPT)
    check_training(runner, records[0], runner.reference(job))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("seed_oss", {"attention_dropout": 0.0, "residual_dropout": 0.0}),
        ("cwm", {"sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"]}),
    ],
)
def test_a_row_of_the_table_trains_as_the_plain_reference(runner, tmp_path, family, settings):
    path = make_tiny_model(tmp_path / "model", family=family, **settings)
    job = job_on(runner, path, tensor_parallel_size=2)
    records = runner.run(probes.train, 2, job, BATCHES, KEPT)
    check_training(runner, records[0], runner.reference(job))


@pytest.mark.deep
@pytest.mark.parametrize(
    "changes",
    [
        {"tensor_parallel_size": 2, "sequence_parallel": True},
        {"pipeline_parallel_size": 2},
        {"context_parallel_size": 2},
        {"distributed_optimizer": False},
    ],
    ids=str,
)
def test_bfloat16_strays_in_every_layout_as_a_plain_model_does(runner, changes):
    job = runner.job("llama", dtype=Dtype.BFLOAT16, **changes)
    check_bfloat16(runner, runner.run(probes.train, 2, job, BATCHES, KEPT)[0], job)


@pytest.mark.parametrize("shared", [True, False], ids=["shared_out", "whole"])
def test_master_weights_go_from_bfloat16_to_fsdp2_and_back(runner, tiny, shared):
    """A step too small for bfloat16 is in what the other engine reads, and in what comes back; frozen weights are rounded."""
    small = replace(runner.job("qwen2").config.optimizer, lr=1e-6)
    job = job_on(
        runner, tiny, dtype=Dtype.BFLOAT16, optimizer=small, distributed_optimizer=shared, freeze=("*.mlp.*",)
    )
    config = Fsdp2Config(
        model=job.config.model, optimizer=small, micro_batch_tokens=60, freeze=job.config.freeze
    )
    plain = Job(engine=engine_class("fsdp2"), config=config, loss_fn=job.loss_fn)
    first, second = runner.folder(), runner.folder()
    runner.run(probes.save, 2, job, BATCHES[:1], first)
    _, loaded, _ = runner.run(probes.resume, 2, plain, [], BATCHES[:1], first)[0]
    untrained = runner.run(probes.train, 2, plain, BATCHES[:1], (0,))[0].weights_after[0]
    for name, weight in loaded.items():
        assert (weight - untrained[name]).abs().max() < (1e-2 if ".mlp." in name else 1e-5), name
        assert torch.equal(weight, weight.bfloat16().float()) == (".mlp." in name), name
    runner.run(resaved, 2, job, first, second)
    _, again, _ = runner.run(probes.resume, 2, plain, [], BATCHES[:1], second)[0]
    for name, weight in loaded.items():
        assert torch.equal(again[name], weight), name


def resaved(world, job, source, target):
    with probes.running(world, job) as engine:
        engine.load_checkpoint(source)
        engine.save_checkpoint(target, global_step=2)


AGAIN = {"activation_checkpointing": True}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_moe", {"expert_parallel_size": 2, **AGAIN}),
        ("mixtral", {"tensor_parallel_size": 2, "sequence_parallel": True, "dispatcher": "allgather"}),
        ("qwen3_moe", {"context_parallel_size": 2, **AGAIN}),
        pytest.param("qwen3_moe", {"pipeline_parallel_size": 2, **AGAIN}, marks=pytest.mark.deep),
        pytest.param(
            "mixtral", {"packing": False, **AGAIN, "recompute": "attention"}, marks=pytest.mark.deep
        ),
    ],
    ids=str,
)
def test_experts_that_come_with_a_batch_are_replayed_in_every_layout(runner, family, changes):
    check_replay(runner, runner.job(family, **changes), 2)


def said_of_experts(world, job, batches):
    said = []
    with probes.running(world, job) as engine, engine.eval_mode():
        for batch in batches:
            with pytest.raises(BatchError) as raised:
                engine.forward_backward_step(batch, forward_only=True)
            said.append(str(raised.value))
    return said


def test_experts_that_no_router_can_take_are_refused_on_all_ranks(runner):
    def changed(value, place=(), num=4):
        batch = with_drawn_experts(BATCHES[0], 2, 4, 2)
        batch["routed_experts"] = batch["routed_experts"][..., :num].clone()
        batch["routed_experts"][place] = value
        return batch

    batches = [
        changed(1, num=3),
        changed(4),
        changed(-2),
        changed(1, (1, 0, slice(2, 4))),
        changed(-1, (1, 0, 3)),
    ]
    for said in runner.run(said_of_experts, 2, runner.job("qwen3_moe"), batches):
        assert ["layers x" in said[0], "0..3" in said[1], "got -2" in said[2]] == [True] * 3
        assert all("different experts" in each for each in said[3:])


@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen2", {"tensor_parallel_size": 2}), ("qwen3_moe", {"expert_parallel_size": 2})],
)
def test_random_init_takes_the_shape_and_draws_the_same_in_every_layout(runner, tmp_path, family, changes):
    path = make_tiny_model(tmp_path / "model", family=family, **FAMILIES[family].settings)
    (tmp_path / "model" / "model.safetensors").unlink()
    job = runner.job(family, **changes)
    job = replace(job, config=replace(job.config, model=ModelConfig(path=path, random_init=True, seed=3)))
    alone = replace(job, config=replace(job.config, **dict.fromkeys(changes, 1)))
    drawn = runner.run(probes.train, 1, alone, [], (0,))[0].weights_after[0]
    for name, weight in runner.run(probes.train, 2, job, [], (0,))[1].weights_after[0].items():
        assert torch.equal(weight, drawn[name]), name
    first, second = (drawn[f"model.layers.{layer}.self_attn.q_proj.weight"] for layer in (0, 1))
    assert first.std() == pytest.approx(0.02, rel=0.2)
    assert not torch.equal(first, second)
    assert torch.equal(drawn["model.norm.weight"], torch.ones(32))


def seen_by_attention(world, job, batch):
    """Return the number of micro-batches, and the length of the longest sequence that attention saw."""
    lengths, forward = [], Attention.forward

    def noted(self, query, key, value, attention_mask, **more):
        lengths.extend(attention_mask.tolist())
        return forward(self, query, key, value, attention_mask, **more)

    with patched(Attention, "forward", noted), probes.running(world, job) as engine, engine.eval_mode():
        lengths.clear()
        _, ctx = engine.forward_backward_step(engine.shard_data(batch), forward_only=True)
    return ctx.stats.num_micro_batches, max(lengths)


@pytest.mark.parametrize(
    ("family", "changes", "sharing"),
    [
        ("qwen2", {"pipeline_parallel_size": 2}, 1),
        ("qwen2", {"tensor_parallel_size": 2}, 1),
        ("qwen2", {"tensor_parallel_size": 2, "sequence_parallel": True}, 2),
    ],
    ids=str,
)
def test_a_micro_batch_grows_with_those_who_share_its_tokens_and_its_filler_is_no_longer_than_they(
    runner, family, changes, sharing
):
    """Rows have 143, 142, 147 and 4 tokens, or, where two share them, 285 and 151; no sequence has more than 39."""
    batch, job = random_batch(20, max_tokens=40, seed=0), runner.job(family, micro_batch_tokens=150)
    lengths = fed_lengths(batch["loss_mask"]).tolist()
    alone = replace(job, config=replace(job.config, micro_batch_tokens=150 * sharing))
    expected = runner.run(seen_by_attention, 1, alone, batch)[0]
    assert expected == (len(plan_micro_batches(lengths, max_tokens=150 * sharing)), max(lengths))
    shared = replace(job, config=replace(job.config, **changes))
    assert runner.run(seen_by_attention, 2, shared, batch) == [expected] * 2


def of_two_engines(world, job):
    """Return the deadlines of the groups of two engines, and where CUDA's names lead while the second works."""
    config = replace(job.config, tensor_parallel_size=2, collective_timeout_s=120)
    with patched(torch.cuda, "is_available", lambda: True):
        made = [make_groups(replace(config, collective_timeout_s=limit_s), world) for limit_s in (120, 240)]
        with made[1].lent():
            device = torch.cuda.current_device()
    tensor = [each.state["_TENSOR_MODEL_PARALLEL_GROUP"] for each in made]
    limits_s = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in tensor]
    return limits_s, str(device)


def test_an_engine_has_deadlines_of_its_own_and_on_a_cpu_no_gpu_that_the_process_sees(runner):
    """What is planted: torch says that there is a GPU."""
    assert runner.run(of_two_engines, 2, runner.job("qwen2")) == [([120.0, 240.0], "cpu")] * 2


def both(world, fsdp2, megatron, batch):
    """Train a step with one engine, score with another of another layout, and again the other way round."""
    torch.set_num_threads(1)
    answers = []
    with probes.running(world, fsdp2) as plain, probes.running(world, megatron) as second:
        third = MegatronEngine(replace(megatron.config, tensor_parallel_size=1), world)
        third.init_model()
        for engine in (second, third, plain, second):
            with engine.eval_mode():
                share = engine.shard_data(batch)
                predictions, _ = engine.forward_backward_step(share, forward_only=True)
            answers.append(engine.unshard_data(predictions)["logprobs"])
        third.close()
    return answers


def test_engines_of_several_layouts_live_in_one_process(runner, tiny):
    job = job_on(runner, tiny, tensor_parallel_size=2)
    plain = Job(
        engine=engine_class("fsdp2"), config=Fsdp2Config(model=ModelConfig(path=tiny)), loss_fn=job.loss_fn
    )
    for answers in runner.run(both, 2, plain, job, BATCHES[0]):
        for logprobs in answers:
            torch.testing.assert_close(logprobs, answers[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("changes", SEVERAL_LAYOUTS, ids=str)
def test_five_steps_of_fsdp2_and_of_megatron_are_the_same(runner, tiny, changes):
    job = job_on(runner, tiny, **changes)
    config = Fsdp2Config(model=job.config.model, optimizer=job.config.optimizer, micro_batch_tokens=60)
    plain = Job(engine=engine_class("fsdp2"), config=config, loss_fn=job.loss_fn)
    ours = runner.run(probes.train, 2, job, BATCHES, (STEPS,))[0]
    theirs = runner.run(probes.train, 2, plain, BATCHES, (STEPS,))[0]
    for mine, other in zip(ours.losses, theirs.losses, strict=True):
        assert mine == pytest.approx(other, rel=1e-6)
    for name, weight in theirs.weights_after[STEPS].items():
        torch.testing.assert_close(ours.weights_after[STEPS][name], weight, atol=1e-5, rtol=0)


@pytest.mark.parametrize("changes", SEVERAL_LAYOUTS, ids=str)
def test_a_run_of_fsdp2_goes_on_with_megatron_and_the_reverse_with_its_moments(runner, tiny, changes):
    job = job_on(runner, tiny, **changes)
    config = Fsdp2Config(model=job.config.model, optimizer=job.config.optimizer, micro_batch_tokens=60)
    plain = Job(engine=engine_class("fsdp2"), config=config, loss_fn=job.loss_fn)
    whole = runner.run(probes.train, 2, plain, BATCHES, (STEPS,))[0]
    for first, second in ((plain, job), (job, plain)):
        folder = runner.folder()
        saved = runner.run(probes.save, 2, first, BATCHES[:2], folder)[0]
        found, loaded, record = runner.run(probes.resume, 2, second, [], BATCHES[2:], folder)[0]
        assert found == 2
        for name, weight in saved.items():
            assert torch.equal(loaded[name], weight), name
        for mine, other in zip(record.losses, whole.losses[2:], strict=True):
            assert mine == pytest.approx(other, rel=1e-6)
        for name, weight in whole.weights_after[STEPS].items():
            torch.testing.assert_close(record.weights_after[3][name], weight, atol=1e-6, rtol=0)


def reloaded(world, job, folder):
    """Export, load what was exported, and return both engines' weights."""
    with probes.running(world, job) as first:
        before = probes.weights_of(first)
        first.export_huggingface(folder)
    again = replace(job, config=replace(job.config, model=replace(job.config.model, path=folder)))
    with probes.running(world, again) as second:
        return before, probes.weights_of(second)


TENSORS = {"tensor_parallel_size": 2, "sequence_parallel": True, "dispatcher": "allgather"}
LAYOUTS = [
    TENSORS,
    {"expert_parallel_size": 2},
    pytest.param({"context_parallel_size": 2}, marks=pytest.mark.deep),
    pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.deep),
    pytest.param({}, marks=pytest.mark.deep),
]


@pytest.mark.parametrize("changes", LAYOUTS, ids=str)
def test_load_export_load_is_the_same_to_the_bit(runner, tmp_path, changes):
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    path = make_tiny_model(tmp_path / "moe", family="qwen3_moe", **mixture)
    job = job_on(runner, path, **changes)
    before, after = runner.run(reloaded, 2, job, str(tmp_path / "exported"))[0]
    for name, weight in before.items():
        assert torch.equal(weight, after[name]), name


def test_what_cannot_be_done_here_is_refused_with_a_sentence(tiny):
    config = MegatronConfig(
        model=ModelConfig(path=tiny), context_parallel_size=3, deterministic=True, virtual_pipeline_size=3
    )
    said = {refusal.setting: str(refusal) for refusal in MegatronEngine.check(config, 2)}
    assert "tensor x pipeline x context" in said["num_ranks"]
    assert said.keys() >= {"num_ranks", "deterministic", "virtual_pipeline_size"}


def test_what_megatron_core_cannot_train_a_mixture_with_is_refused_before_it_starts(tmp_path):
    path = make_tiny_model(tmp_path / "moe", family="mixtral", num_local_experts=4, num_experts_per_tok=2)
    config = MegatronConfig(model=ModelConfig(path=path), tensor_parallel_size=2)
    assert {refusal.setting for refusal in MegatronEngine.check(config, 2)} == {
        "dispatcher",
        "sequence_parallel",
    }


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("gemma", {}, "of the families it knows"),
        ("llama", {"attention_bias": True}, "`attention_bias` False"),
        ("qwen2", {"hidden_act": "gelu"}, "`hidden_act` 'silu'"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "`mlp_only_layers` []"),
        ("llama", {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "whole heads"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_a_model_is_exact_or_refused(tmp_path, family, changes, says):
    path = make_tiny_model(tmp_path / "odd", family=family, **changes)
    refused = MegatronEngine.check(MegatronConfig(model=ModelConfig(path=path)), 1)
    assert [refusal.setting for refusal in refused] == ["model.path"]
    assert says in refused[0].reason


@pytest.mark.parametrize(("ranks", "what"), [(4, "2 key-value heads"), (8, "4 attention heads")])
def test_heads_that_ranks_cannot_share_are_refused_from_config_json_alone(tmp_path, ranks, what):
    path = make_tiny_model(tmp_path / "model")
    config = MegatronConfig(model=ModelConfig(path=path), tensor_parallel_size=ranks)
    refused = [each for each in MegatronEngine.check(config, ranks) if each.setting == "tensor_parallel_size"]
    assert any(f"the model has {what}, which {ranks} do not divide" in each.reason for each in refused)


def costs(world, job, plain):
    torch.set_num_threads(1)
    engines = [one.engine(one.config, world) for one in (job, plain)]
    for engine in engines:
        engine.init_model()
    return [engine._state.cost for engine in engines]


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("family", ["qwen2", "qwen2_untied", "qwen3_moe"])
def test_the_cost_of_a_model_by_its_table_is_that_by_its_parameters(runner, tmp_path, family, head):
    known = FAMILIES[family]
    path = make_tiny_model(tmp_path / "model", family=known.model_type, head=head, **known.settings)
    settings = {"model": ModelConfig(path=path, head=head), "freeze": ("*.self_attn.*",)}
    job = Job(engine=MegatronEngine, config=MegatronConfig(**settings), loss_fn=SftLoss())
    plain = Job(engine=engine_class("fsdp2"), config=Fsdp2Config(**settings), loss_fn=SftLoss())
    ours, expected = runner.run(costs, 2, job, plain)[0]
    assert ours == expected
    assert 0 < ours.num_trained < ours.num_params


def what_init_says(world, job):
    with pytest.raises(ConfigError) as raised:
        job.engine(job.config, world).init_model()
    return str(raised.value)


def test_weights_that_are_no_numbers_are_refused_by_name_on_all_ranks(runner, tmp_path):
    path = make_tiny_model(tmp_path / "model", tie_word_embeddings=False)
    weights = load_file(f"{path}/model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"][3, 3] = float("nan")
    save_file(weights, f"{path}/model.safetensors", metadata={"format": "pt"})
    for said in runner.run(what_init_says, 2, job_on(runner, path, tensor_parallel_size=2)):
        assert "NaN or infinity, such as `model.layers.1.self_attn.k_proj.weight`" in said


def test_weights_that_the_table_does_not_expect_are_refused_by_name(tmp_path):
    path = make_tiny_model(tmp_path / "model", tie_word_embeddings=False)
    weights = load_file(f"{path}/model.safetensors")
    del weights["model.layers.1.self_attn.o_proj.weight"]
    save_file(weights, f"{path}/model.safetensors", metadata={"format": "pt"})
    [refused] = MegatronEngine.check(MegatronConfig(model=ModelConfig(path=path)), 1)
    assert "lack 1 weights, such as `model.layers.1.self_attn.o_proj.weight`" in refused.reason
