"""What the Megatron engine refuses that would have been wrong without a word: tokens, settings and checkpoints of another model."""

from dataclasses import replace

import pytest

from offbeat_engine import (
    BatchError,
    CheckpointError,
    ConfigError,
    ModelConfig,
    OptimizerConfig,
    Schedule,
    World,
)
from offbeat_engine.megatron import MegatronConfig, MegatronEngine
from offbeat_engine.testing import make_tiny_model, probes
from offbeat_engine.testing.runner import BATCHES, Options, Runner

pytestmark = pytest.mark.spawns


@pytest.fixture(scope="module")
def runner():
    made = Runner(Options(engine=MegatronEngine, families=("qwen2",), num_ranks=2))
    yield made
    made.close()


def job_on(runner, path, **changes):
    job = runner.job("qwen2", **changes)
    return replace(job, config=replace(job.config, model=ModelConfig(path=path)))


def said_of_tokens(world, job):
    batch = BATCHES[0].clone()
    batch["input_ids"][0, 1] = 64
    with probes.running(world, job) as engine, engine.eval_mode(), pytest.raises(BatchError) as caught:
        engine.forward_backward_step(engine.shard_data(batch), forward_only=True)
    return str(caught.value)


@pytest.mark.parametrize("changes", [{"tensor_parallel_size": 2}, {}], ids=str)
def test_tokens_that_no_rank_has_are_refused_on_all(runner, tmp_path, changes):
    path = make_tiny_model(tmp_path, family="qwen2")  # of 64
    for said in runner.run(said_of_tokens, 2, job_on(runner, path, **changes)):
        assert "1 tokens that the model has not, such as 64" in said


def saved(world, job, folder):
    with probes.running(world, job) as engine:
        engine.save_checkpoint(folder)


def said_of_checkpoint(world, job, folder):
    with probes.running(world, job) as engine:
        before = {name: tensor.clone() for name, tensor in engine.named_weights()}
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(folder)
        assert all(tensor.equal(before[name]) for name, tensor in engine.named_weights())
    return str(caught.value)


@pytest.mark.parametrize("larger", [{"layers": 3}, {"tie_word_embeddings": False}], ids=str)
def test_a_checkpoint_that_has_more_than_the_model_is_refused(runner, tmp_path, larger):
    more = make_tiny_model(tmp_path / "more", family="qwen2", **larger)
    less = make_tiny_model(tmp_path / "less", family="qwen2")
    folder = str(tmp_path / "checkpoints")
    runner.run(saved, 2, job_on(runner, more), folder)
    for said in runner.run(said_of_checkpoint, 2, job_on(runner, less), folder):
        assert "does not fit the model: it has `weight/" in said


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"schedule": Schedule.COSINE, "warmup_steps": 2, "total_steps": 0}, "optimizer.total_steps"),
        ({"lr": -1e-3}, "optimizer.lr"),
        ({"lr": float("nan")}, "optimizer.lr"),
        ({"beta2": 1.0}, "optimizer.beta2"),
        ({"eps": 0.0}, "optimizer.eps"),
        ({"weight_decay": -0.1}, "optimizer.weight_decay"),
    ],
    ids=str,
)
def test_no_weight_is_stepped_by_settings_that_no_optimizer_takes(tmp_path, settings, names):
    path = make_tiny_model(tmp_path, family="qwen2")
    config = MegatronConfig(model=ModelConfig(path=path), optimizer=OptimizerConfig(**settings))
    [refusal] = MegatronEngine.check(config, 1)
    assert refusal.setting == names


def test_a_vocabulary_of_which_a_rank_would_have_nothing_is_refused(tmp_path):
    path = make_tiny_model(tmp_path, family="qwen2", vocab_size=9, num_key_value_heads=4)
    config = MegatronConfig(model=ModelConfig(path=path), tensor_parallel_size=4)
    (refusal,) = MegatronEngine.check(config, 4)
    assert (refusal.setting, "none of the model's 9 tokens" in refusal.reason) == (
        "tensor_parallel_size",
        True,
    )
    assert MegatronEngine.check(replace(config, tensor_parallel_size=2), 4) == []


def test_one_normalised_expert_per_token_is_refused(tmp_path):
    path = make_tiny_model(tmp_path, family="mixtral", num_experts_per_tok=1)
    (refusal,) = MegatronEngine.check(MegatronConfig(model=ModelConfig(path=path)), 1)
    assert refusal.setting == "model.path"
    assert "one expert per token" in refusal.reason


def test_a_device_that_the_rank_is_not_on_is_refused_by_name(tiny):
    engine = MegatronEngine(MegatronConfig(model=ModelConfig(path=tiny), device="cuda"), World())
    with pytest.raises(ConfigError, match=r"give `MegatronConfig.device` and `World.device` the same value"):
        engine.init_model()
