"""Settings of megatron-core's own that pass through `megatron_args`; of fusions and grouped experts only what is seen without a GPU."""

import warnings
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch

from offbeat_engine import Dtype, ModelConfig, StateError
from offbeat_engine.megatron import MegatronConfig, MegatronEngine
from offbeat_engine.megatron.config import OF_COPIES, OF_LAYERS, library_refusals
from offbeat_engine.megatron.families import Among
from offbeat_engine.megatron.loading import _of_expert
from offbeat_engine.testing import make_tiny_model, probes
from offbeat_engine.testing.runner import BATCHES, Options, Runner

OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 3000}


def refused(path, arguments, **settings):
    config = MegatronConfig(model=ModelConfig(path=str(path)), megatron_args=arguments, **settings)
    return {each.setting: each.reason for each in library_refusals(config)}


def test_what_passes_through_is_listed_and_all_else_is_refused_with_a_reason(tiny):
    assert refused(tiny, {**OVERLAP, "bias_activation_fusion": False}) == {}
    found = refused(
        tiny,
        {
            "overlap_param_gather": True,
            "bias_fusion": True,
            "num_layers": 3,
            "bias_dropout_fusion": True,
            "moe_grouped_gemm": True,
        },
    )
    for name, said in {
        "overlap_param_gather": "those of the step before",
        "bias_fusion": "did you mean `bias_",
        "num_layers": "these are: bias_activation_fusion",
        "bias_dropout_fusion": "compiled for GPUs",
        "moe_grouped_gemm": "Transformer Engine's",
    }.items():
        assert said in found[f"megatron_args.{name}"]
    there = {"device": "cuda", "dtype": Dtype.BFLOAT16}
    assert refused(tiny, {"bias_dropout_fusion": True}, **there) == {}
    for asked, num in (("auto", 1), (False, 1), (True, 0), ("e4m3", 0)):
        assert len(refused(tiny, {"moe_grouped_gemm": True}, transformer_engine=asked, **there)) == num
    config = MegatronConfig(model=ModelConfig(path=str(tiny)), megatron_args={"bucket_sise": 1})
    assert any(each.setting == "megatron_args.bucket_sise" for each in MegatronEngine.check(config, 1))


def test_every_name_is_a_setting_of_megatron_core():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that it would rather have
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.transformer import TransformerConfig

    assert OF_LAYERS.keys() <= {item.name for item in fields(TransformerConfig)}
    assert OF_COPIES.keys() <= {item.name for item in fields(DistributedDataParallelConfig)}


@pytest.mark.parametrize("name", ["local_experts.1.linear_fc2.weight", "linear_fc2.weight1"])
def test_grouped_experts_are_the_same_matrices_under_other_names(name):
    shape, groups = SimpleNamespace(num_experts=8), SimpleNamespace(expert=Among(2, 4))
    found = _of_expert(f"mlp.experts.{name}", shape, groups)
    assert found == ("mlp.experts.local_experts.{expert}.linear_fc2.weight", 5)


@pytest.fixture(scope="module")
def runner():
    made = Runner(Options(engine=MegatronEngine, families=("qwen2", "mixtral"), num_ranks=2))
    yield made
    made.close()


def trained(world, job):
    """Take three steps; return weights, and how many buckets were under way when each call returned."""
    under_way = []
    with probes.running(world, job) as engine:
        for batch in BATCHES[:3]:
            with engine.train_mode():
                engine.optimizer_zero_grad()
                engine.forward_backward_step(engine.shard_data(batch))
                groups = [group for chunk in engine._ready().chunks for group in chunk.wrapped.bucket_groups]
                under_way.append(sum(group.grad_reduce_handle is not None for group in groups))
                engine.optimizer_step()
                engine.lr_scheduler_step()
        return probes.weights_of(engine), under_way


def refusing(world, job):
    """Return what a second training call, and a look at gradients, come to."""
    said = []
    with probes.running(world, job) as engine, engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_step(engine.shard_data(BATCHES[0]))
        for call in (
            lambda: engine.forward_backward_step(engine.shard_data(BATCHES[0])),
            lambda: list(engine.named_gradients()),
        ):
            with pytest.raises(StateError) as caught:
                call()
            said.append(str(caught.value))
        engine.optimizer_step()
        engine.optimizer_zero_grad()
        engine.forward_backward_step(engine.shard_data(BATCHES[1]))
    return said


def with_args(job, **changes):
    return replace(job, config=replace(job.config, megatron_args=OVERLAP, **changes))


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("family", "changes", "num_ranks"),
    [
        ("qwen2", {}, 2),
        ("qwen2", {"distributed_optimizer": False}, 2),
        pytest.param("mixtral", {"expert_parallel_size": 2}, 2, marks=pytest.mark.deep),
        pytest.param("qwen2", {"pipeline_parallel_size": 2}, 4, marks=pytest.mark.deep),
    ],
    ids=str,
)
def test_gradients_that_leave_during_backward_are_those_that_leave_after_it(
    runner, family, changes, num_ranks
):
    job = runner.job(family, micro_batch_tokens=24, **changes)
    # Without clipping: a norm adds up other shards, in another order.
    job = replace(job, config=replace(job.config, optimizer=replace(job.config.optimizer, max_grad_norm=0.0)))
    plain = runner.run(trained, num_ranks, job)
    for (weights, under_way), (expected, none) in zip(
        runner.run(trained, num_ranks, with_args(job)), plain, strict=True
    ):
        assert none == [0, 0, 0]
        # In the first step megatron-core counts what will be ready when.
        assert under_way[0] == 0
        assert min(under_way[1:]) > 1, "several buckets"
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], atol=0, rtol=0, msg=name)


@pytest.mark.spawns
def test_a_second_call_whose_gradients_would_stay_behind_is_refused(runner):
    for second, gradients in runner.run(refusing, 2, with_args(runner.job("qwen2"))):
        assert "one belongs to each step" in second
        assert "keeps the gradients that it steps with" in gradients


def test_of_a_mixture_grouped_experts_are_refused_without_their_kernels(tmp_path):
    path = make_tiny_model(tmp_path / "tiny", family="mixtral")
    config = MegatronConfig(model=ModelConfig(path=str(path)), megatron_args={"moe_grouped_gemm": True})
    assert [each.setting for each in MegatronEngine.check(config, 1)] == ["megatron_args.moe_grouped_gemm"]
