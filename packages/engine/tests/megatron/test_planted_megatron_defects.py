"""Defects that only an engine of this make can have, one at a time: the suite must see each."""

import re
import sys
from contextlib import contextmanager

import pytest

from offbeat_engine import ConfigError, ModelConfig
from offbeat_engine.config import Feature
from offbeat_engine.megatron import MegatronConfig, MegatronEngine, build, families, loading
from offbeat_engine.megatron.families import Block, Cut
from offbeat_engine.megatron.layers import context, model
from offbeat_engine.testing import make_tiny_model
from offbeat_engine.testing.models import Variant
from offbeat_engine.testing.runner import Options, Ranks, Runner
from offbeat_engine.testing.suite import cases

pytestmark = pytest.mark.spawns


@contextmanager
def patched(module, name, value):
    kept = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, kept)


class Unchecked(MegatronEngine):
    """Does not look for itself, so that it is the suite that must see what is wrong."""

    def _difference(self, parts, reference):
        return None


class QueriesThenKeys(Unchecked):
    """Lays all queries before all keys and values, instead of by groups: in and out, so that weights look right."""

    def init_model(self):
        def plain(called, shape, tensor):
            place, found = 0, []
            for name, whole in called:
                share = whole[0] // tensor.size
                rest, zeros = whole[1:], (0,) * (len(whole) - 1)
                found.append(
                    Block(name, whole, (tensor.rank * share, *zeros), (share, *rest), (place, *zeros))
                )
                place += share
            return found

        with patched(families, "_qkv", plain):
            super().init_model()


class HalvesOnRanks(Unchecked):
    """Cuts gate over up into runs of rows, so that one rank has the gate and the other what it gates."""

    def init_model(self):
        right = families.blocks_of

        def swapped(entry, layer, expert, shape, tensor):
            if entry.cut is not Cut.GLU:
                return right(entry, layer, expert, shape, tensor)
            name = families.names(entry, layer, expert)[tensor.rank]
            whole = (shape.ffn, shape.hidden)
            return [Block(name, whole, (0, 0), whole, (0, 0))]

        with patched(loading, "blocks_of", swapped), patched(build, "blocks_of", swapped):
            super().init_model()


class DividedAgain(MegatronEngine):
    """Lets the schedule divide the loss by the number of micro-batches, which the loss's own count is for."""

    def init_model(self):
        made = model.transformer_config

        def dividing(*arguments):
            config = made(*arguments)
            config.calculate_per_token_loss = False
            return config

        with patched(model, "transformer_config", dividing):
            super().init_model()


class TiedApart(MegatronEngine):
    """Does not bring the two stages' gradients of a tied embedding together."""

    def named_gradients(self):
        module = sys.modules["megatron.core.distributed.finalize_model_grads"]
        with patched(module, "_allreduce_word_embedding_grads", lambda *_: None):
            yield from super().named_gradients()


@contextmanager
def chunks_swapped():
    right, works = context.chunks_of, context._works.__wrapped__

    def swapped(lengths, place, *rest):
        context.dealt(lengths, place[1])  # known by now: the row itself is dealt out as it should be
        with patched(context, "chunks_of", lambda *of: right(*of)[::-1]):
            return works(lengths, place, *rest)

    with patched(context, "_works", swapped):
        yield


class ChunksTheOtherWay(Unchecked):
    """Lets attention take a rank's two chunks of each sequence for one another; rotary angles and answers are by the right ones."""

    def _run(self, *arguments):
        with chunks_swapped():
            return super()._run(*arguments)


class ContextApart(MegatronEngine):
    """Adds gradients up over copies, and not over the ranks that share their sequences."""

    def init_model(self):
        made = build.make_groups

        def apart(*arguments):
            groups = made(*arguments)
            for name in ("_DATA_PARALLEL_GROUP_WITH_CP", "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP"):
                groups.state[name] = groups.state["_DATA_PARALLEL_GROUP"]
            return groups

        with patched(build, "make_groups", apart):
            super().init_model()


class ChecksChunksTheOtherWay(MegatronEngine):
    def _difference(self, parts, reference):
        with chunks_swapped():
            return super()._difference(parts, reference)


class ChecksQueriesThenKeys(QueriesThenKeys):
    _difference = MegatronEngine._difference


class ChecksHalvesOnRanks(HalvesOnRanks):
    _difference = MegatronEngine._difference


TENSOR = r": `[\w.]+` at \[\d+(, \d+)?\]: expected -?\d.*, got -?\d"
TOKEN = r"`logprobs` of sequence \d+, token \d+ \(id \d+, length \d+\): expected -\d.*, got -?\d"
PLANTED = [
    (QueriesThenKeys, "training_qwen2_one_rank", "first step: " + TOKEN),
    (HalvesOnRanks, "training_qwen2_tensor_2", "first step: " + TOKEN),
    (DividedAgain, "training_qwen2_one_at_a_time", "gradient of step 1" + TENSOR),
    (TiedApart, "training_qwen2_pipeline_2", r"gradient of step 1: `model\.embed_tokens\.weight`"),
    (ChunksTheOtherWay, "training_qwen2_context_2", "first step: " + TOKEN),
    (ContextApart, "training_qwen2_context_2", "gradient of step 1" + TENSOR),
]
VARIANTS = [
    Variant(name=f"{name}_2", changes={f"{name}_parallel_size": 2}, features=frozenset({feature}), exact=True)
    for name, feature in (
        ("tensor", Feature.TENSOR_PARALLEL),
        ("pipeline", Feature.PIPELINE_PARALLEL),
        ("context", Feature.CONTEXT_PARALLEL),
    )
]


@pytest.fixture(scope="module")
def ranks():
    started = Ranks()
    yield started
    started.close()


@pytest.mark.parametrize(
    ("engine", "case", "says"),
    [
        # The engine refuses three by itself, too, below.
        pytest.param(*row, id=row[0].__name__, marks=[pytest.mark.deep] if number in {0, 1, 4} else [])
        for number, row in enumerate(PLANTED)
    ],
)
def test_the_suite_names_what_is_wrong(ranks, engine, case, says):
    runner = Runner(
        Options(engine=engine, families=("qwen2",), num_ranks=2, extra_variants=tuple(VARIANTS)), ranks
    )
    try:
        by_name = {each.name: each for each in cases(runner.options)}
        with pytest.raises(AssertionError, match=says):
            by_name[case].check(runner)
    finally:
        runner.close()


@pytest.mark.parametrize(
    ("engine", "num_ranks", "layout"),
    [
        (ChecksQueriesThenKeys, 1, {}),
        (ChecksHalvesOnRanks, 2, {"tensor_parallel_size": 2}),
        (ChecksChunksTheOtherWay, 2, {"context_parallel_size": 2}),
    ],
    ids=["queries", "halves", "chunks"],
)
def test_the_engine_itself_refuses_with_both_figures(ranks, tmp_path, engine, num_ranks, layout):
    path = make_tiny_model(tmp_path / "model")
    config = MegatronConfig(model=ModelConfig(path=path), **layout)
    says = (
        r"qwen2: a probe token has -\d\S* by Hugging Face's forward and -\d\S* by this engine \(.*"
        r"rounding explains .*\); no setting of this engine makes them agree"
    )
    for said in ranks.pool(num_ranks).run(what_init_says, engine, config):
        assert re.match(says, said), said


def what_init_says(world, engine, config):
    with pytest.raises(ConfigError) as raised:
        engine(config, world).init_model()
    return str(raised.value)
