"""The sync loop on real parts in one process: engine, replica, manager, transport. No Ray."""

import asyncio
import inspect
import json
import re
import sys
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import offbeat_trainer
from offbeat_ckptsync import SyncConfig
from offbeat_engine import Fsdp2Config, ModelConfig, OptimizerConfig, World, engine_class
from offbeat_engine.testing import make_tiny_model
from offbeat_rollout import RolloutConfig, SamplingParams
from offbeat_rollout.toolkit.registry import adapter_class
from offbeat_trainer import (
    AsyncConfig,
    Grpo,
    GrpoConfig,
    Learner,
    LoadError,
    LoopConfig,
    MemoryJournal,
    Partial,
    Ppo,
    PpoConfig,
    Prompt,
    RewardConfig,
    Role,
    SamplingConfig,
    Schedule,
    Score,
    SqliteJournal,
    StepShape,
    TrainerError,
    algorithm_class,
)
from offbeat_trainer.algorithms.learner import LocalPolicy
from offbeat_trainer.algorithms.roles import role_engines
from offbeat_trainer.cluster.weights import LocalPublisher
from offbeat_trainer.loops.online import run_fully_async, run_one_step_off, run_sync
from offbeat_trainer.loops.outcome import Outcome
from offbeat_trainer.loops.run_store import RunStore
from offbeat_trainer.loops.session import Session, StopRequest
from offbeat_trainer.rollouts.scorer import TaskScorer
from offbeat_trainer.rollouts.single import GroupGenerator, SingleTurn, derive_seed, run_all
from offbeat_trainer.watch.jsonl import JsonlReporter
from scripted.run import at_their_step

VOCAB = 32
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
LOOP = LoopConfig(
    steps=4,
    prompts_per_step=4,
    group_size=4,
    validate_every=2,
    validation_prompts=4,
    save_every=2,
    sample_every=2,
)


class LowTokens:
    """A task: completions earn the share of their tokens that are below 16. Satisfies `Task`."""

    def prompts(self, step, num_prompts):
        return [self._prompt(derive_seed("train", step, index)) for index in range(num_prompts)]

    def validation_prompts(self, num_prompts):
        return [self._prompt(derive_seed("held out", index)) for index in range(num_prompts)]

    def score(self, prompt, completion):
        low = sum(token < VOCAB // 2 for token in completion.token_ids) / completion.num_tokens
        return Score(reward=low, correct=low == 1)

    def decode(self, token_ids):
        return " ".join(map(str, token_ids))

    def stop_token_ids(self):
        return ()

    def _prompt(self, seed):
        ids = tuple(1 + (seed >> (5 * place)) % (VOCAB - 1) for place in range(4))
        return Prompt(uid=str(seed), text=str(ids), token_ids=ids)


def new_engine(config):
    engine = engine_class("fsdp2")(config, World())
    engine.init_model()
    return engine


async def run(
    folder, model, *, loop=LOOP, kind=Grpo, algorithm=None, transport="loopback", resume=False, updates=1, stop=None,
    mode=run_sync, **asynchronous,
):  # fmt: skip
    algorithm = kind(
        config=kind.Config() if algorithm is None else algorithm,
        step=StepShape(updates_per_step=updates, max_completion_tokens=8),
    )
    config = Fsdp2Config(model=ModelConfig(path=model), optimizer=OptimizerConfig(lr=3e-3))
    engines = role_engines(algorithm.roles(), config, infers_alone=True)
    roles = {name: Role(new_engine(told)) for name, told in engines.items()}
    engine = roles["policy"].engine
    replica = adapter_class("hf")(RolloutConfig(model_path=model, max_model_len=32))
    await replica.start()
    reporter = JsonlReporter(folder)
    policy = LocalPolicy(Learner(algorithm, roles, checkpoints=str(folder), keep=2), timeout_s=600)
    sync = SyncConfig(transport=transport, disk_path=str(folder / "sync"))
    parts = Session(
        task=LowTokens(),
        policy=policy,
        rollout=SingleTurn(
            GroupGenerator(replica.generate_many, replica.abort),
            TaskScorer(LowTokens().score, RewardConfig()),
        ),
        publisher=await LocalPublisher.between(engine, replica, sync),
        reporter=reporter,
        store=RunStore(folder / "state", keep=2),
        seed=7,
        loop=loop,
        algorithm=algorithm,
        sampling=SamplingConfig(max_tokens=8),
        stop=StopRequest() if stop is None else stop,
        **asynchronous,
    )
    outcome = Outcome()
    start = 0
    if resume:
        start = await policy.load(None)
        reporter.truncate_after(start)
        state = parts.store.load(start)
        outcome.accuracy_before, outcome.reward_first = state.accuracy_before, state.reward_first
    try:
        await mode(parts, outcome, start)
    finally:
        await replica.stop()
        reporter.close()
    return outcome


def history(folder):
    """Return the metrics of each step without what depends on the clock; see `at_their_step`."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clocks = ("time", "sync/", "buffer/", "idle/", "memory/")
    kept = [{key: value for key, value in line.items() if not key.startswith(clocks)} for line in lines]
    return [*at_their_step({line["step"]: line for line in kept}).values()]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    return str(make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", vocab_size=VOCAB))


async def test_a_policy_learns_and_what_was_sampled_is_what_is_trained(tmp_path, model):
    outcome = await run(tmp_path, model, loop=replace(LOOP, steps=12, prompts_per_step=8, group_size=8))
    assert outcome.reward_last > outcome.reward_first + 0.1
    assert outcome.max_abs_logprob_diff < 1e-4
    assert [line["step"] for line in history(tmp_path)] == list(range(1, 13))


async def test_a_resumed_run_repeats_the_undisturbed_one_bit_for_bit(tmp_path, model):
    await run(tmp_path / "whole", model)
    await run(tmp_path / "parts", model, loop=replace(LOOP, steps=2))
    await run(tmp_path / "parts", model, resume=True)
    whole, resumed = history(tmp_path / "whole"), history(tmp_path / "parts")
    assert len(whole) == 4
    assert resumed[2:] == whole[2:]
    same = [{key: value for key, value in line.items() if key != "accuracy/validation"} for line in whole[:2]]
    assert [{k: v for k, v in line.items() if k != "accuracy/validation"} for line in resumed[:2]] == same


async def test_kl_to_a_reference_and_several_updates_a_step(tmp_path, model):
    await run(tmp_path, model, algorithm=GrpoConfig(kl_coef=0.1), updates=2, loop=replace(LOOP, steps=2))
    first, second = history(tmp_path)
    assert first["policy/ref_kl_nats"] >= 0
    assert second["policy/ref_kl_nats"] > first["policy/ref_kl_nats"]
    assert first["policy/ratio_max"] > 1  # the second mini-batch meets a policy that has moved


async def by_the_verbs(session, outcome, start):
    """The synchronous loop, written with a session's verbs."""
    session.version = (await session.publisher.publish(start + 1)).version
    while session.steps < session.loop.steps:
        groups = await session.sample(session.task.prompts(session.steps, session.loop.prompts_per_step))
        await session.train(await session.batch(groups))
        await session.step()
        await session.publish()
        outcome.steps = session.steps


async def test_a_loop_by_the_verbs_of_a_session_is_the_synchronous_one_to_the_bit(tmp_path, model):
    loop = replace(LOOP, validate_every=0, save_every=0)
    await run(tmp_path / "ours", model, loop=loop)
    await run(tmp_path / "own", model, loop=loop, mode=by_the_verbs)
    ours, own = history(tmp_path / "ours"), history(tmp_path / "own")
    assert len(own) == loop.steps
    for whole, by_hand in zip(ours, own, strict=True):
        assert {"train/loss", "train/grad_norm", "reward/mean", "mismatch/kl_nats"} <= by_hand.keys()
        assert by_hand == {key: whole[key] for key in by_hand}


class Compared(Grpo):
    """Has a greedy completion beside each group."""

    def baseline(self):
        return {"temperature": 0.0}


async def test_what_a_session_samples_has_the_baseline_of_its_algorithm(tmp_path, model):
    async def sample(session, outcome, start):
        await session.publisher.publish(1)
        prompts = session.task.prompts(0, 3)
        plain = await run_all(session.rollout, prompts, replace(GREEDY, seed=1), 1)
        groups = await session.sample(prompts, n=2)
        assert [len(group.trajectories) for group in groups] == [2, 2, 2]
        assert [group.baseline for group in groups] == [group.scores for group in plain]

    await run(tmp_path, model, kind=Compared, mode=sample)


async def test_gradients_add_up_over_calls_and_nothing_else_happens_while_they_wait(tmp_path, model):
    found = {}

    async def one_step(session, outcome, start):
        await session.publisher.publish(1)
        groups = await session.sample(session.task.prompts(0, 4), n=2, max_tokens=5)
        again = await session.sample(session.task.prompts(0, 4), n=2)
        assert [one.trajectories for one in again] != [one.trajectories for one in groups]
        assert max(turn.num_tokens for one in groups for turn in one.trajectories) == 5
        batch = await session.batch(groups)
        with pytest.raises(TrainerError, match="there is no gradient to step by"):
            await session.step()
        parts = [batch] if found == {} else [batch[:3], batch[3:]]
        for part in parts:
            await session.train(part, sums=True)
        for forbidden in (session.save(), session.policy.update(batch)):
            with pytest.raises(TrainerError, match="gradients wait for a step"):
                await forbidden
        metrics = await session.step(lr=0.01, betas=(0.5, 0.7))
        found[len(parts)] = (metrics["train/grad_norm"], await session.logprobs(batch))
        with pytest.raises(TrainerError, match="there is no role 'critic'; the algorithm has policy"):
            await session.logprobs(batch, "critic")
        with pytest.raises(LoadError, match="no algorithm named 'grop'"):
            await session.train(batch, "grop")
        before = await session.logprobs(batch)
        await session.save()
        await session.train(batch, "cross_entropy")
        await session.step()
        assert not torch.equal(await session.logprobs(batch), before)
        assert (await session.load(), session.steps) == (1, 1)
        assert torch.equal(await session.logprobs(batch), before)

    for name in ("whole", "cut"):
        await run(tmp_path / name, model, mode=one_step)
    torch.testing.assert_close(found[2], found[1], rtol=1e-5, atol=1e-6)


async def test_the_disk_transport_gives_the_same_run(tmp_path, model):
    await run(tmp_path / "loopback", model, loop=replace(LOOP, steps=2))
    await run(tmp_path / "disk", model, loop=replace(LOOP, steps=2), transport="disk")
    assert history(tmp_path / "disk") == history(tmp_path / "loopback")


async def test_a_stop_request_ends_the_run_after_its_step_with_a_checkpoint(tmp_path, model):
    stop = StopRequest()
    stop.requested = True
    outcome = await run(tmp_path, model, stop=stop)
    assert (outcome.steps, outcome.interrupted) == (1, True)
    resumed = await run(tmp_path, model, resume=True)
    assert (resumed.steps, resumed.steps_here, resumed.interrupted) == (4, 3, False)


async def test_fully_async_without_staleness_is_sync_with_real_engines(tmp_path, model):
    await run(tmp_path / "sync", model)
    settings = AsyncConfig(max_staleness=0)
    await run(tmp_path / "async", model, mode=run_fully_async, asynchrony=settings)
    assert history(tmp_path / "async") == history(tmp_path / "sync")


async def test_running_ahead_learns_too(tmp_path, model):
    loop = replace(LOOP, steps=12, prompts_per_step=8, group_size=8)
    for mode in (run_one_step_off, run_fully_async):
        folder = tmp_path / mode.__name__
        outcome = await run(folder, model, loop=loop, mode=mode)
        assert outcome.reward_last > outcome.reward_first + 0.1
        lines = history(folder)
        assert max(line["staleness/max"] for line in lines) in (1, 2)
        assert all(0.5 < line["offpolicy/ess_fraction"] <= 1.000001 for line in lines)


async def test_a_deterministic_run_goes_on_where_its_journal_stands(tmp_path, model):
    def journal(name):
        return closing(SqliteJournal(tmp_path / name / "journal.sqlite"))

    settings = {"mode": run_one_step_off}
    with journal("whole") as kept:
        await run(tmp_path / "whole", model, journal=kept, **settings)
    stop = StopRequest()
    stop.requested = True
    with journal("parts") as kept:
        await run(tmp_path / "parts", model, stop=stop, journal=kept, **settings)
    with journal("parts") as kept:
        await run(tmp_path / "parts", model, resume=True, journal=kept, **settings)
    assert history(tmp_path / "parts") == history(tmp_path / "whole")


async def test_a_recorded_schedule_is_replayed_to_the_bit(tmp_path, model):
    """Completions of up to three versions, made again in the same pieces: loss and gradient norm agree exactly."""
    settings = {"mode": run_fully_async, "asynchrony": AsyncConfig(max_staleness=3, partial=Partial.ABORT)}
    loop = replace(LOOP, steps=5)
    journal = MemoryJournal()
    await run(tmp_path / "recorded", model, loop=loop, journal=journal, **settings)
    schedule = Schedule.of(journal.events())
    await run(tmp_path / "replayed", model, loop=loop, replay=schedule, **settings)
    assert history(tmp_path / "replayed") == history(tmp_path / "recorded")


async def test_gspo_learns_while_half_of_the_tokens_are_clipped(tmp_path, model):
    """Its bounds are narrow: the paper clips far more than GRPO does, too (arXiv 2507.18071, section 5.2)."""
    loop = replace(LOOP, steps=12, prompts_per_step=8, group_size=8)
    outcome = await run(tmp_path, model, kind=algorithm_class("gspo"), updates=4, loop=loop)
    assert outcome.reward_last > outcome.reward_first + 0.1
    cut = [line["policy/clip_low_fraction"] + line["policy/clip_high_fraction"] for line in history(tmp_path)]
    assert all(0.2 < fraction < 0.8 for fraction in cut)
    assert all(line["mismatch/max_abs_logprob_diff"] < 1e-4 for line in history(tmp_path))
    assert all(line["mismatch/kl_nats"] < 1e-6 for line in history(tmp_path))


PPO = PpoConfig(critic_lr=1e-2)
MODES = {"sync": run_sync, "one_step_off": run_one_step_off, "fully_async": run_fully_async}


@pytest.mark.parametrize("mode", MODES)
async def test_ppo_learns_and_its_critic_follows(tmp_path, model, mode):
    loop = replace(LOOP, steps=16, prompts_per_step=8, group_size=8)
    outcome = await run(tmp_path, model, kind=Ppo, algorithm=PPO, loop=loop, mode=MODES[mode])
    assert outcome.reward_last > outcome.reward_first + 0.1
    lines = history(tmp_path)
    errors = [line["critic/loss"] for line in lines]
    assert sum(errors[-4:]) / 4 < errors[0] / 3
    assert all(line["train/grad_norm"] > 0 and line["critic/grad_norm"] > 0 for line in lines)


async def test_a_resumed_ppo_has_its_critic_back_and_its_place_in_the_warm_up(tmp_path, model):
    settings = {"kind": Ppo, "algorithm": replace(PPO, critic_warmup_steps=3, kl_coef=0.1), "updates": 2}
    await run(tmp_path / "whole", model, **settings)
    await run(tmp_path / "parts", model, loop=replace(LOOP, steps=2), **settings)
    await run(tmp_path / "parts", model, resume=True, **settings)
    whole, resumed = history(tmp_path / "whole"), history(tmp_path / "parts")
    assert resumed[2:] == whole[2:]
    assert ["train/loss" in line for line in whole] == [False, False, False, True]
    assert all(line["critic/loss"] > 0 for line in whole)
    assert all((tmp_path / "whole" / role / "step_4").is_dir() for role in ("policy", "critic"))


DATAFLOW = Path(__file__).parents[3] / "docs" / "dataflow.md"
HOUSE = str(Path(offbeat_trainer.__file__).parent) + "/"


class Rooms:
    """Notes which files of the trainer run a function from the start of "generate" to the end of "train". Satisfies `Reporter`."""

    def __init__(self, mode):
        self.entered, self._mode, self._open, self._inner = set(), mode, False, None

    async def __call__(self, parts, outcome, start):
        self._inner = parts.reporter
        await self._mode(replace(parts, reporter=self), outcome, start)

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def phase(self, name, detail=""):
        self._open = name in ("generate", "reward", "train")
        self._inner.phase(name, detail)

    def trace(self, frame, event, argument):
        code = frame.f_code  # of a function: bodies of modules and classes run at import
        if self._open and code.co_flags & inspect.CO_OPTIMIZED and code.co_filename.startswith(HOUSE):
            self.entered.add(code.co_filename.removeprefix(HOUSE))


@pytest.mark.parametrize(
    ("mode", "journal"),
    [(run_sync, None), (run_fully_async, "journal.sqlite")],
    ids=["sync", "fully_async"],
)
def test_one_prompt_is_followed_through_few_files(tmp_path, model, mode, journal):
    rooms, before = Rooms(mode), sys.gettrace()
    kept = {} if journal is None else {"journal": SqliteJournal(tmp_path / journal)}
    one = replace(LOOP, steps=1, prompts_per_step=1, validate_every=0, save_every=0, sample_every=0)
    threading.settrace(rooms.trace)  # before any thread is started
    sys.settrace(rooms.trace)
    try:
        asyncio.run(run(tmp_path, model, loop=one, mode=rooms, **kept))
    finally:
        sys.settrace(before)
        threading.settrace(before)
    files = sorted(rooms.entered)
    text = DATAFLOW.read_text().partition("## The files")[2].partition("\n## ")[0]
    sync, other = (set(re.findall(r"`([\w/]+\.py)`", part)) for part in text.split("Fully asynchronous"))
    # `other` names a file for each of sync's that it does without.
    told = sync if mode is run_sync else sync ^ other
    assert rooms.entered == told, files
    assert len(files) <= 15, f"{len(files)} files:\n" + "\n".join(files)
