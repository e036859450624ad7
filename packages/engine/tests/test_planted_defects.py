"""The suite must fail: one defect at a time in an otherwise good engine, caught by the case that is meant for it.

Each defect lives in a subclass and lasts only as long as a call, so that the ranks can be shared.
"""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from offbeat_engine import Feature, LossScale, NonFiniteError, StepContext
from offbeat_engine.fsdp2 import Fsdp2Engine, stepping
from offbeat_engine.fsdp2.attention import packed as attention
from offbeat_engine.fsdp2.attention import packing
from offbeat_engine.fsdp2.memory import updater
from offbeat_engine.fsdp2.model import replay
from offbeat_engine.testing import RanksError
from offbeat_engine.testing.runner import Options, Ranks, Runner
from offbeat_engine.testing.suite import cases, check_declaration, reason_to_skip

pytestmark = pytest.mark.spawns


@contextmanager
def patched(module, name, value):
    kept = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, kept)


class Unchecked(Fsdp2Engine):
    """Does not compare itself with Hugging Face's forward at its start: the suite must see for itself."""

    def _difference(self, parts):
        return None


class TokensPerRank(Unchecked):
    """Divides by this rank's token count instead of all ranks'."""

    def forward_backward_step(self, batch, ctx=None, *args, **kwargs):
        scale = LossScale(num_tokens=int(batch["loss_mask"].sum()), num_sequences=9)
        return super().forward_backward_step(batch, StepContext(scale=scale), *args, **kwargs)


class ShiftedLabel(Unchecked):
    """Takes one label of each micro-batch from its neighbour."""

    def forward_backward_step(self, *args, **kwargs):
        def shifted(*arguments):
            good = packing.lay_out(*arguments)
            targets = good.targets_M.clone()
            targets[:1] = good.targets_M.roll(1)[:1]
            return replace(good, targets_M=targets)

        with patched(stepping, "lay_out", shifted):
            return super().forward_backward_step(*args, **kwargs)


class PositionsRunOn(Unchecked):
    """Counts positions through the packed row instead of from each sequence's start."""

    def forward_backward_step(self, *args, **kwargs):
        laid_out = packing.RowInputs.__call__

        def running(*arguments):
            inputs, where = laid_out(*arguments)
            return {**inputs, "position_ids": torch.arange(inputs["input_ids"].shape[1])[None]}, where

        with patched(packing.RowInputs, "__call__", running):
            return super().forward_backward_step(*args, **kwargs)


class NoBoundary(Unchecked):
    """Lets every sequence of a packed row attend to those before it."""

    def forward_backward_step(self, *args, **kwargs):
        def joined(where_ST, own_ST, lengths, device):
            place_1N = torch.arange(sum(lengths))[None]
            return attention.plan_padded(place_1N, place_1N >= 0, [sum(lengths)], device)

        with patched(stepping, "inputs_maker", lambda config: packing.RowInputs(joined)):
            return super().forward_backward_step(*args, **kwargs)


class LayersSwapped(Unchecked):
    """Replays each layer's experts in the layer that is as far from the other end."""

    def forward_backward_step(self, *args, **kwargs):
        take = replay.Routers.take

        def swapped(self, experts_NK):
            if experts_NK is not None:
                experts_NK = experts_NK.unflatten(1, (len(self._routers), -1)).flip(1).flatten(1)
            take(self, experts_NK)

        with patched(replay.Routers, "take", swapped):
            return super().forward_backward_step(*args, **kwargs)


class DroppedShard(Unchecked):
    """Keeps the last rank's old shard of the first weight when it loads."""

    def load_checkpoint(self, *args, **kwargs):
        shard = updater.local(next(iter(self._state.updater.params.values())).detach())
        kept = shard.clone()
        found = super().load_checkpoint(*args, **kwargs)
        if self.world.rank == self.world.size - 1:
            shard.copy_(kept)
        return found


class SavesLater(Unchecked):
    """Saves in the background what is there when somebody waits for it."""

    def save_checkpoint(self, *args, block=True, **kwargs):
        save = super().save_checkpoint
        return save(*args, **kwargs) if block else SimpleNamespace(wait=lambda: save(*args, **kwargs))


class ForgottenMoments(Unchecked):
    """Loads the weights and starts the optimizer afresh."""

    def load_checkpoint(self, *args, **kwargs):
        found = super().load_checkpoint(*args, **kwargs)
        self._state.updater.set_moments({})
        return found


class LastCallOnly(Unchecked):
    """Forgets the gradient of an earlier call."""

    def forward_backward_step(self, *args, **kwargs):
        self.optimizer_zero_grad()
        return super().forward_backward_step(*args, **kwargs)


class ClipPerRank(Unchecked):
    """Clips by the norm of this rank's shards."""

    def optimizer_step(self, *args, **kwargs):
        with patched(updater, "sum_tensor", lambda world, tensor: tensor):
            return super().optimizer_step(*args, **kwargs)


class NoTemperature(Unchecked):
    """Never divides by the temperature."""

    def forward_backward_step(self, batch, *args, **kwargs):
        return super().forward_backward_step(batch.exclude("temperature"), *args, **kwargs)


class NothingFrozen(Unchecked):
    """Trains what it was told to leave."""

    def __init__(self, config, world):
        super().__init__(replace(config, freeze=()), world)


class TiedTwice(Unchecked):
    """Hands out a tied weight under both of its names."""

    def named_weights(self):
        for name, tensor in super().named_weights():
            yield name, tensor
            if name == "model.embed_tokens.weight":
                yield "lm_head.weight", tensor


class WholePast(Unchecked):
    """Lets every token see all before it, whatever the model's window."""

    def forward_backward_step(self, *args, **kwargs):
        with patched(attention, "_window_mask", lambda window, source: None):
            return super().forward_backward_step(*args, **kwargs)


class ReversedRows(Unchecked):
    """Gives the rows back in the wrong order."""

    def unshard_data(self, data):
        rows = super().unshard_data(data)
        return rows[torch.arange(len(rows)).flip(0)]


class StepsOnNan(Unchecked):
    """Takes a step whatever the loss was."""

    def optimizer_step(self, *args, **kwargs):
        self._lost_step = False
        for param in self._state.updater.params.values():
            param.grad = torch.nan_to_num(param.grad)
        return super().optimizer_step(*args, **kwargs)


class AloneWithItsNan(Unchecked):
    """The rank with the bad loss raises before the others know."""

    def forward_backward_step(self, batch, *args, **kwargs):
        if self.world.rank == 1 and bool((batch["input_ids"] == 63).any()):
            raise NonFiniteError("only I know")
        return super().forward_backward_step(batch, *args, **kwargs)


class GradientsOfOneRank(Unchecked):
    """Averages gradients over ranks where they should add up."""

    def optimizer_step(self, *args, **kwargs):
        for param in self._state.updater.params.values():
            param.grad /= self.world.size
        return super().optimizer_step(*args, **kwargs)


class TakesAll(Unchecked):
    """Takes weights over whole whatever was to be kept."""

    def take_weights(self, other, keep=0.0):
        super().take_weights(other)


class OwnTokenOnly(Unchecked):
    """Takes the likeliest tokens' log-probabilities at another temperature."""

    def forward_backward_step(self, batch, ctx=None, **kwargs):
        answer = super().forward_backward_step(batch, ctx, **kwargs)
        if ctx is not None and ctx.top_k:
            answer[0]["top_logprobs"] = (answer[0]["top_logprobs"] / 1.1).log_softmax(-1)
        return answer


class OneRateForAll(Unchecked):
    """Steps by the config whatever the call says."""

    def optimizer_step(self, lr=None, betas=None):
        return super().optimizer_step()


class LateSchedule(Unchecked):
    """Never advances the learning rate."""

    def lr_scheduler_step(self):
        return self._state.updater.set_num_steps(0)


class ForgetfulExport(Unchecked):
    """Streams the weights of the start."""

    def init_model(self):
        super().init_model()
        self._first = [(name, tensor.clone()) for name, tensor in super().named_weights()]

    def named_weights(self):
        yield from self._first


class AdaptersStayOn(Unchecked):
    """Gives the policy for its base."""

    def base_mode(self):
        return self.eval_mode()


class TrainableReference(Unchecked):
    """Lets a model be trained that is there to be asked."""

    def _check_trained(self):
        pass


class OneBuffer(Unchecked):
    """Streams all weights through the same memory."""

    def named_weights(self):
        buffer = torch.empty(1 << 20)
        for name, tensor in super().named_weights():
            yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)


# Engine, the case that must catch it, and what it must say: which tensor or token, what was expected, what came.
TOKEN = r"`logprobs` of sequence \d+, token \d+ \(id \d+, length \d+\): expected -\d.*, got -?\d"
TENSOR = r": `[\w.]+` at \[\d+(, \d+)?\]: expected -?\d.*, got -?\d"
PLANTED = [
    (TokensPerRank, "training_qwen2_two_ranks", r"loss of step 1: expected \d.*, got \d"),
    (ShiftedLabel, "training_qwen2_two_ranks", "first step: " + TOKEN),
    (PositionsRunOn, "training_llama_two_ranks", "first step: " + TOKEN),
    (NoBoundary, "training_qwen2_two_ranks", "first step: " + TOKEN),
    (LayersSwapped, "routed_experts_qwen3_moe", "first step: " + TOKEN),
    (SavesLater, "checkpoint_background_1", "weights on rank . after loading" + TENSOR),
    (DroppedShard, "checkpoint_2_to_2", "weights on rank . after loading" + TENSOR),
    (DroppedShard, "checkpoint_2_to_1", "weights on rank . after loading" + TENSOR),
    (
        ForgottenMoments,
        "checkpoint_1_to_1",
        r"loss of step 4, after loading step 2: expected \d.*, got \d",
    ),
    (LastCallOnly, "accumulation_one_rank", "gradient accumulated over two calls" + TENSOR),
    (ClipPerRank, "training_qwen2_two_ranks", r"gradient norm of step 1: expected \d.*, got \d"),
    (NoTemperature, "training_qwen2_one_rank", "first step: " + TOKEN),
    (NothingFrozen, "training_qwen2_frozen", r"gradient of step 1: .*unexpected: .*model\.layers\.0\."),
    (TiedTwice, "training_qwen2_one_rank", r"weights at the start: .*unexpected: lm_head\.weight"),
    (TiedTwice, "manifest_qwen2", r"`named_weights` yields .*lm_head\.weight"),
    (WholePast, "training_mistral_two_ranks", "first step: " + TOKEN),
    (ReversedRows, "order_two_ranks", "first step: " + TOKEN),
    (StepsOnNan, "nonfinite_gradient_skip_2", r"should skip the step and return a norm of NaN, got \d"),
    (GradientsOfOneRank, "training_qwen2_two_ranks", r"gradient norm of step 1: expected \d.*, got \d"),
    (
        TakesAll,
        "calls_take_weights_1",
        r"weights of rank 0 that took over 0\.25 of another engine's" + TENSOR,
    ),
    (OwnTokenOnly, "calls_top_tokens_1", "log-probabilities of likeliest tokens" + TENSOR),
    (OneRateForAll, "calls_step_rates_1", "after steps by rates of their own" + TENSOR),
    (LateSchedule, "training_qwen2_one_rank", r"learning rate after step 1: expected 0\.001, got 0\.0005"),
    (AdaptersStayOn, "lora_base_1", "the base of a policy with adapters: " + TOKEN),
    (TrainableReference, "inference_only_qwen2", "should raise StateError"),
    (ForgetfulExport, "training_qwen2_one_rank", "weights after 1 steps" + TENSOR),
]


@pytest.fixture(scope="module")
def ranks():
    started = Ranks()
    yield started
    started.close()


@contextmanager
def running(engine, ranks=None):
    runner = Runner(
        Options(engine=engine, families=("qwen2", "llama", "mistral", "qwen3_moe"), num_ranks=2), ranks
    )
    try:
        yield runner, {case.name: case for case in cases(runner.options)}
    finally:
        runner.close()


@pytest.mark.parametrize(
    ("engine", "case", "says"), [pytest.param(*row, id=f"{row[0].__name__}-{row[1]}") for row in PLANTED]
)
def test_the_suite_names_what_is_wrong(ranks, engine, case, says):
    with running(engine, ranks) as (runner, by_name):
        chosen = by_name[case]
        assert reason_to_skip(chosen, engine.capabilities(), runner.options) is None
        with pytest.raises(AssertionError, match=says):
            chosen.check(runner)


def test_weights_that_are_streamed_through_one_buffer_are_seen(ranks):
    with (
        running(OneBuffer, ranks) as (runner, by_name),
        pytest.raises(RanksError, match=r"rank 0: (.|\n)*`model\.embed_tokens\.weight` changed after"),
    ):
        by_name["training_qwen2_one_rank"].check(runner)


def test_a_rank_that_raises_alone_is_a_failure_and_not_a_hang(ranks):
    with running(AloneWithItsNan, ranks) as (runner, by_name):
        by_name["scoring_two_ranks"].check(runner)  # whatever starting takes does not count
        ranks.pool(2).timeout_s = 10.0
        with pytest.raises(RanksError, match=r"rank 0: (no answer within 10 s|died with exit code)"):
            by_name["nonfinite_loss_stop_2"].check(runner)


class Boastful(Unchecked):
    """Declares what no case can exercise."""

    @classmethod
    def capabilities(cls):
        said = super().capabilities()
        features = said.features | {Feature.TENSOR_PARALLEL}
        return replace(
            said, features=features, missing={f: r for f, r in said.missing.items() if f not in features}
        )


class Mute(Unchecked):
    """Says nothing about one feature and gives no reason for another."""

    @classmethod
    def capabilities(cls):
        said = super().capabilities()
        missing = {**said.missing, Feature.TENSOR_PARALLEL: ""}
        return replace(said, features=said.features - {Feature.PACKING}, missing=missing)


def test_a_declared_feature_that_nothing_exercises_is_a_failure():
    with (
        running(Boastful) as (runner, _),
        pytest.raises(AssertionError, match="declares tensor_parallel, which no"),
    ):
        check_declaration(runner)


def test_a_feature_must_be_there_or_missing_with_a_reason():
    with (
        running(Mute) as (runner, _),
        pytest.raises(AssertionError, match="packing: neither declared nor missing"),
    ):
        check_declaration(runner)


def test_what_is_missing_is_skipped_in_the_engines_own_words():
    with running(Fsdp2Engine) as (runner, by_name):
        said = Fsdp2Engine.capabilities()
        lacking = replace(
            said, features=said.features - {Feature.PACKING}, missing={Feature.PACKING: "rows are a nuisance"}
        )
        reason = reason_to_skip(by_name["training_qwen2_unpacked"], lacking, runner.options)
    assert reason == "fsdp2 does not declare packing: rows are a nuisance"
