"""What of Transformer Engine's part can be seen without it: refusals, what it is told, and names; its kernels are stood in for."""

import ast
import inspect
import math
import warnings
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from offbeat_engine import Dtype, ModelConfig, World
from offbeat_engine.megatron import MegatronConfig, MegatronEngine
from offbeat_engine.megatron.layers import transformer_engine
from offbeat_engine.megatron.layers.context import dealt
from offbeat_engine.testing import make_tiny_model, probes
from offbeat_engine.testing.cases_training import check_training
from offbeat_engine.testing.runner import BATCHES, KEPT, Options, Runner

CPU = torch.device("cpu")
ASKED = {"device": "cuda", "dtype": Dtype.BFLOAT16, "transformer_engine": True}


def core(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that it would rather have
        return import_module(f"megatron.core.{name}")


@pytest.fixture(autouse=True, scope="module")
def imported():
    core("extensions.transformer_engine")


def configured(path, **settings):
    return MegatronConfig(model=ModelConfig(path=str(path)), **settings)


def refused(path, **settings):
    return {each.setting: each for each in MegatronEngine.check(configured(path, **settings), 1)}


def test_it_is_taken_where_it_is_found_and_refused_where_it_is_asked_for_and_missing(tiny, monkeypatch):
    off = configured(tiny, device="cuda", dtype=Dtype.BFLOAT16)
    config = replace(off, transformer_engine="auto")
    for found in (False, True):
        monkeypatch.setattr(transformer_engine, "is_found", lambda found=found: found)
        assert transformer_engine.is_used(config, World()) == found
        assert not transformer_engine.is_used(off, World()), "nobody has run it: it must be asked for"
        assert not transformer_engine.is_used(replace(config, dtype=Dtype.FLOAT32), World())
        assert not transformer_engine.is_used(replace(config, device="cpu"), World())
    monkeypatch.setattr(transformer_engine, "find_spec", lambda _: None)
    assert not refused(tiny, device="cuda", dtype=Dtype.BFLOAT16, transformer_engine="auto")
    for asked in (True, "e4m3", "hybrid"):
        said = refused(tiny, **{**ASKED, "transformer_engine": asked})["transformer_engine"]
        assert (said.reason, said.remedy[:7]) == ("Transformer Engine is not installed", "install")
        assert "float32 on cpu" in refused(tiny, transformer_engine=asked)["transformer_engine"].reason
    monkeypatch.setattr(transformer_engine, "find_spec", lambda _: "there")
    for asked in (True, "e4m3", "hybrid"):
        assert not refused(tiny, **{**ASKED, "transformer_engine": asked})


@pytest.mark.parametrize(
    ("changes", "settings", "says"),
    [
        ({"hidden": 40, "head_dim": 16}, {}, "40 hidden dimensions"),
        ({"intermediate_size": 48}, {"tensor_parallel_size": 2}, "24 inner dimensions of an MLP on a rank"),
        ({"head_dim": 10}, {}, "40 dimensions of all heads on a rank"),
        ({"head_dim": 12}, {"tensor_parallel_size": 2}, "24 dimensions of all heads on a rank"),
    ],
)
def test_sizes_that_eight_bits_cannot_have_are_refused(tmp_path, changes, settings, says):
    path = make_tiny_model(tmp_path / "odd", **changes)
    asked = {**ASKED, "transformer_engine": "hybrid", **settings}
    assert any(says in each.reason for each in MegatronEngine.check(configured(path, **asked), 2))


@pytest.mark.parametrize(
    ("found", "capability", "says"),
    [
        (True, (8, 9), []),
        (True, (8, 6), ["eight bits need a GPU of compute capability 8.9, this one has 8.6"]),
        (False, (9, 0), ["megatron-core cannot import Transformer Engine on this rank"]),
    ],
)
def test_a_rank_says_what_it_lacks(tiny, found, capability, says):
    config = configured(tiny, **{**ASKED, "transformer_engine": "hybrid"})
    assert [each.reason for each in transformer_engine.lacking(config, found, capability)] == says
    if found:
        config = configured(tiny, **ASKED)
        assert list(transformer_engine.lacking(config, found, capability)) == []


def test_attention_is_told_the_ends_of_all_sequences_and_with_context_where_they_are_cut():
    alone, shared = (transformer_engine.packed((8, 4, 12), one, CPU) for one in (False, True))
    for told in (alone, shared):
        assert told.qkv_format == "thd"
        assert (told.max_seqlen_q, told.max_seqlen_kv) == (12, 12)
        for ends in (told.cu_seqlens_q, told.cu_seqlens_kv):
            assert ends.dtype == torch.int32
            assert ends.tolist() == [0, 8, 12, 24]
    assert (alone.cu_seqlens_q_padded, alone.cu_seqlens_kv_padded) == (None, None)
    assert shared.cu_seqlens_q_padded.tolist() == shared.cu_seqlens_kv_padded.tolist() == [0, 8, 12, 24]


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_the_tokens_that_megatron_core_has_them_have(size):
    """Its own attention, and Transformer Engine's, take their order of a packed row for granted."""
    lengths = (2 * size, 8 * size, 4 * size)
    of_rank = core("models.common.embeddings.rope_utils")._get_thd_freqs_on_this_cp_rank
    for rank, tokens_s in enumerate(dealt(lengths, size)):
        expected, start = [], 0
        for length in lengths:
            row = torch.arange(start, start + length)
            expected.append(of_rank(rank, size, row[: length // size], row))
            start += length
        assert torch.equal(tokens_s, torch.cat(expected))


def signature(name, method):
    """Return the parameters of a class of megatron-core's, which without Transformer Engine exists as text alone."""
    tree = ast.parse(Path(core("extensions.transformer_engine").__file__).read_text())
    found = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    of = next(node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == method)
    return [each.arg for each in (*of.args.args, *of.args.kwonlyargs)]


class PlainKernel(torch.nn.Module):
    """Attention by the ends of sequences, one after the other with a whole mask: a stand-in for `TEDotProductAttention`."""

    def __init__(
        self, config, layer_number, attn_mask_type, attention_type, softmax_scale, cp_comm_type, pg_collection
    ):
        super().__init__()
        assert (attn_mask_type.name, attention_type, cp_comm_type) == ("causal", "self", "p2p")
        assert pg_collection.cp.size() == 1
        self.config, self.scale = config, softmax_scale
        has_window = core("transformer.utils").is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.left = config.window_size[0] if has_window else math.inf

    def forward(self, query, key, value, attention_mask, attn_mask_type, packed_seq_params):
        assert (packed_seq_params.qkv_format, attn_mask_type.name, attention_mask) == ("thd", "causal", None)
        ends = packed_seq_params.cu_seqlens_q.tolist()
        assert ends[-1] == len(query) == len(key)
        assert len(query) % (16 if self.config.fp8 else 1) == 0
        rows = []
        for start, stop in pairwise(ends):
            back = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
            q, k, v = (each[start:stop].transpose(0, 1) for each in (query, key, value))
            k, v = (each.repeat_interleave(len(q) // len(k), 0) for each in (k, v))
            scores = (q @ k.transpose(1, 2) * self.scale).masked_fill(
                (back < 0) | (back > self.left), -math.inf
            )
            rows.append((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
        return torch.cat(rows)


def test_the_stand_in_takes_what_megatron_cores_own_class_takes():
    for method in ("__init__", "forward"):
        ours = [*inspect.signature(getattr(PlainKernel, method)).parameters]
        assert {*ours} <= {*signature("TEDotProductAttention", method)}
    for name in ("TEColumnParallelLinear", "TERowParallelLinear"):
        assert {"config", "bias", "skip_bias_add", "is_expert", "tp_group"} <= {*signature(name, "__init__")}


class OnStandIns(MegatronEngine):
    """Builds its layers as of Transformer Engine, with megatron-core's own matrices and a plain kernel in its place."""

    @classmethod
    def check(cls, config, num_ranks):
        return [each for each in super().check(config, num_ranks) if each.setting != "transformer_engine"]

    def init_model(self):
        local, theirs = core("tensor_parallel"), core("extensions.transformer_engine")
        patches = (
            (transformer_engine, "is_used", lambda *_: True),
            (transformer_engine, "linears", lambda: (local.ColumnParallelLinear, local.RowParallelLinear)),
            (theirs, "TEDotProductAttention", PlainKernel),
            (core("optimizer"), "USING_PYTORCH_OPTIMIZER", False),
            (core("optimizer"), "Adam", None),
        )
        with ExitStack() as stack:
            for owner, name, value in patches:
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
            super().init_model()
        kinds = {
            type(layer.self_attention.core_attention) for layer in self._state.chunks[0].model.decoder.layers
        }
        assert kinds == {transformer_engine.PackedAttention}


@pytest.fixture(scope="module")
def runner():
    families = ("qwen2", "qwen3", "mistral", "mixtral")
    made = Runner(Options(engine=OnStandIns, families=families, num_ranks=2))
    yield made
    made.close()


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (
            "qwen2",
            {"transformer_engine": "hybrid"},
        ),  # which without Transformer Engine fills rows up and leaves products as they are
        ("mistral", {}),
        pytest.param("qwen3", {"tensor_parallel_size": 2, "sequence_parallel": True}, marks=pytest.mark.deep),
        pytest.param("mixtral", {"expert_parallel_size": 2}, marks=pytest.mark.deep),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_layers_of_its_make_have_the_names_of_the_tables_and_are_told_all(runner, family, changes):
    """Also: Adam is torch's, whatever megatron-core finds."""
    job = runner.job(family, **changes)
    num_ranks = 2 if job.config.tensor_parallel_size * job.config.expert_parallel_size > 1 else 1
    records = runner.run(probes.train, num_ranks, job, BATCHES, KEPT)
    check_training(runner, records[0], runner.reference(job))
