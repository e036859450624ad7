import asyncio
import math
import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat_engine import check_batch
from offbeat_rollout import Completion, Finish, version_spans
from offbeat_trainer.algorithms.advantages import OF_REWARDS, compute_advantages, group_advantages
from offbeat_trainer.config import Advantage
from offbeat_trainer.data.assemble import accuracy, assemble, assemble_examples, assembled, group_metrics
from offbeat_trainer.data.metrics import reduce_metrics
from offbeat_trainer.data.types import NO_VERSION, Example, Group, Prompt, Score, Trajectory, is_correct
from offbeat_trainer.errors import TrainerError


def completion(tokens, *, version=3, finish=Finish.STOP):
    return Completion.of(
        request_id="r",
        token_ids=tuple(tokens),
        logprobs=tuple(-0.5 - token for token in tokens),
        policy_versions=tuple(version + i for i in range(len(tokens))),
        finish=finish,
    )


def group(prompt_ids, completions, rewards, uid="p"):
    return Group(
        prompt=Prompt(uid=uid, text="", token_ids=tuple(prompt_ids)),
        trajectories=tuple(map(Trajectory.of, completions)),
        scores=tuple(Score(reward=reward, correct=reward > 0.5) for reward in rewards),
    )


GROUPS = [
    group((5, 6), [completion((7, 8, 9)), completion((), finish=Finish.ABORT)], (1.0, 0.0)),
    group((4,), [completion((3,), finish=Finish.LENGTH)], (0.25,), uid="q"),
]


def targets(groups, kind=Advantage.GRPO):
    return {"advantages": group_advantages(groups, partial(compute_advantages, kind))}


def test_by_hand():
    batch = assemble(GROUPS, targets(GROUPS, Advantage.DR_GRPO), temperature=0.7)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9], [5, 6, 0, 0, 0], [4, 3, 0, 0, 0]]
    assert batch["lengths"].tolist() == [5, 2, 2]
    assert batch["loss_mask"].int().tolist() == [[0, 0, 1, 1, 1], [0] * 5, [0, 1, 0, 0, 0]]
    assert batch["advantages"].tolist() == [[0, 0, 0.5, 0.5, 0.5], [0] * 5, [0] * 5]
    assert batch["rollout_logprobs"].tolist() == [[0, 0, -7.5, -8.5, -9.5], [0] * 5, [0, -3.5, 0, 0, 0]]
    assert batch["policy_version"].tolist() == [[-1, -1, 3, 4, 5], [-1] * 5, [-1, 3, -1, -1, -1]]
    assert batch["temperature"].tolist() == pytest.approx([0.7] * 3)
    assert batch["group"].tolist() == [0, 0, 1]


tokens = st.lists(st.integers(1, 99), max_size=6)
groups_of_tokens = st.lists(
    st.tuples(st.lists(st.integers(1, 99), min_size=1, max_size=5), st.lists(tokens, min_size=1, max_size=4)),
    min_size=1,
    max_size=5,
)


@given(groups_of_tokens)
def test_every_sequence_reads_back(drawn):
    groups = [
        group(prompt, [completion(c) for c in some], [0.1 * len(c) for c in some], uid=str(i))
        for i, (prompt, some) in enumerate(drawn)
    ]
    wanted = targets(groups)
    batch = assemble(groups, wanted, temperature=1.0)
    advantages = iter(wanted["advantages"].tolist())
    check_batch(batch)
    rows = iter(range(batch.batch_size[0]))
    for index, one in enumerate(groups):
        for made in one.trajectories:
            row, advantage = batch[next(rows)], next(advantages)
            start, end = len(one.prompt.token_ids), int(row["lengths"])
            assert row["input_ids"][:end].tolist() == [*one.prompt.token_ids, *made.token_ids.tolist()]
            assert row["loss_mask"].nonzero().flatten().tolist() == list(range(start, end))
            assert row["rollout_logprobs"][start:end].tolist() == pytest.approx(made.logprobs.tolist())
            assert row["policy_version"][start:end].tolist() == list(made.policy_versions)
            assert row["advantages"][start:end].tolist() == pytest.approx([advantage] * (end - start))
            assert row["group"] == index
            outside = ~row["loss_mask"]
            assert not row["advantages"][outside].any()
            assert not row["rollout_logprobs"][outside].any()
            assert (row["policy_version"][outside] == NO_VERSION).all()


def slowly(groups, advantages, temperature):
    """What `assemble` returns, token by token, as lists."""
    width = max(
        len(one.prompt.token_ids) + len(made.token_ids) for one in groups for made in one.trajectories
    )
    fills = {
        "input_ids": 0,
        "loss_mask": False,
        "advantages": 0.0,
        "rollout_logprobs": 0.0,
        "policy_version": -1,
    }
    rows = {key: [] for key in (*fills, "lengths", "temperature", "group")}
    of_each = iter(advantages)
    for index, one in enumerate(groups):
        for made in one.trajectories:
            mine = next(of_each)
            row = {key: [fill] * width for key, fill in fills.items()}
            place = 0
            for token in one.prompt.token_ids:
                row["input_ids"][place] = token
                place += 1
            versions = [span.version for span in made.spans for _ in range(span.start, span.end)]
            for token, logprob, version in zip(made.token_ids, made.logprobs, versions, strict=True):
                row["input_ids"][place] = int(token)
                row["loss_mask"][place] = True
                row["advantages"][place] = mine[place - len(one.prompt.token_ids)]
                row["rollout_logprobs"][place] = float(logprob)
                row["policy_version"][place] = version
                place += 1
            for key, values in {**row, "lengths": place, "temperature": temperature, "group": index}.items():
                rows[key].append(values)
    return rows


made_of = st.lists(
    st.tuples(st.integers(0, 2**31 - 1), st.floats(-50, 0, width=32), st.integers(0, 2)), max_size=6
)
groups_made_of = st.lists(
    st.tuples(
        st.lists(st.integers(0, 99), min_size=1, max_size=5), st.lists(made_of, min_size=1, max_size=4)
    ),
    min_size=1,
    max_size=5,
)


def of_tuples(tokens):
    ids, logprobs, versions = zip(*tokens, strict=True) if tokens else ((), (), ())
    return Completion.of(
        request_id="r", token_ids=ids, logprobs=logprobs, policy_versions=versions, finish=Finish.STOP
    )


def of_arrays(tokens):
    return Completion(
        request_id="r",
        token_ids=np.array([token for token, _, _ in tokens], np.int32),
        logprobs=np.array([logprob for _, logprob, _ in tokens], np.float32),
        spans=version_spans((version, 1) for _, _, version in tokens),
        finish=Finish.STOP,
    )


@given(groups_made_of)
def test_tuples_and_arrays_make_the_batch_that_a_slow_loop_makes(drawn):
    batches = []
    for make in (of_tuples, of_arrays):
        groups = [
            group(prompt, [make(tokens) for tokens in some], [0.0] * len(some)) for prompt, some in drawn
        ]
        made = [completion for one in groups for completion in one.trajectories]
        spread_B = torch.tensor([0.1 * index - 1 / 3 for index in range(len(made))], dtype=torch.float64)
        batches.append(assemble(groups, {"advantages": spread_B}, temperature=0.7))
        longest = max(completion.num_tokens for completion in made)
        each_BC = spread_B[:, None] + torch.arange(longest)
        for row, completion in enumerate(made):
            each_BC[row, completion.num_tokens :] = math.nan  # no token has what lies there
        batches.append(assemble(groups, {"advantages": each_BC}, temperature=0.7))
    spread, each = (
        slowly(groups, rows, 0.7)
        for rows in (spread_B[:, None].expand_as(each_BC).tolist(), each_BC.tolist())
    )
    for batch, slow in zip(batches, (spread, each) * 2, strict=True):
        assert set(batch.keys()) == set(slow)
        for key, values in slow.items():
            assert torch.equal(batch[key], torch.tensor(values, dtype=batch[key].dtype)), key


def test_advantages_of_mixed_group_sizes_come_back_in_order():
    rewards = [(1.0, 0.0), (1.0, 0.0, 0.5), (0.0, 3.0), (2.0, 2.0, 2.0)]
    groups = [group((1,), [completion((2,))] * len(r), r) for r in rewards]
    for kind in OF_REWARDS:
        made_B = targets(groups, kind)["advantages"]
        assert made_B.dtype is torch.float64
        wanted = [compute_advantages(kind, torch.tensor(reward, dtype=torch.float64)) for reward in rewards]
        assert made_B.tolist() == torch.cat(wanted).tolist()


def test_examples():
    batch = assemble_examples(
        [
            Example(prompt_ids=(1, 2), completion_ids=(3,)),
            Example(prompt_ids=(4,), completion_ids=(5, 6, 7)),
        ]
    )
    assert batch["input_ids"].tolist() == [[1, 2, 3, 0], [4, 5, 6, 7]]
    assert batch["loss_mask"].int().tolist() == [[0, 0, 1, 0], [0, 1, 1, 1]]
    assert batch["lengths"].tolist() == [3, 4]
    assert set(batch.keys()) == {"input_ids", "loss_mask", "lengths"}


def test_metrics_by_hand():
    assert reduce_metrics(group_metrics(GROUPS)) == pytest.approx(
        {
            "accuracy/train": 1 / 3,
            "completion/aborted_fraction": 1 / 3,
            "completion/length_max": 3,
            "completion/length_mean": 4 / 3,
            "completion/truncated_fraction": 1 / 3,
            "group/zero_variance_fraction": 1 / 2,
            "reward/max": 1.0,
            "reward/mean": 1.25 / 3,
            "reward/std": 0.25,  # (0.5 + 0) / 2
            "tokens/generated": 4,
        }
    )


def test_metrics_of_parts_join_to_those_of_the_whole():
    parts = [metric for one in GROUPS for metric in group_metrics([one])]
    assert reduce_metrics(parts) == pytest.approx(reduce_metrics(group_metrics(GROUPS)))


@pytest.mark.parametrize(
    ("groups", "temperature", "words"),
    [
        ([], 1.0, "at least one group"),
        (GROUPS, 0.0, "temperature"),
        (GROUPS, math.nan, "temperature"),
        ([group((), [completion((1,))], (1.0,))], 1.0, "empty prompt"),
    ],
)
def test_what_cannot_be_assembled_is_refused(groups, temperature, words):
    with pytest.raises(TrainerError, match=words):
        assemble(groups, targets(groups), temperature=temperature)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64])
def test_a_target_leaves_tokens_out_that_would_be_trained(dtype):
    whole = assemble(GROUPS, targets(GROUPS, Advantage.DR_GRPO), temperature=0.7)
    last = torch.tensor([[1, 0, 1], [1, 1, 1], [1, 1, 1]], dtype=dtype)
    some = assemble(GROUPS, {**targets(GROUPS, Advantage.DR_GRPO), "loss_mask": last}, temperature=0.7)
    assert some["loss_mask"].int().tolist() == [[0, 0, 1, 0, 1], [0] * 5, [0, 1, 0, 0, 0]]
    assert some["advantages"].tolist() == [[0, 0, 0.5, 0, 0.5], [0] * 5, [0] * 5]
    assert some["policy_version"].tolist() == [[-1, -1, 3, -1, 5], [-1] * 5, [-1, 3, -1, -1, -1]]
    assert torch.equal(some["input_ids"], whole["input_ids"])
    none = assemble(GROUPS, {"loss_mask": torch.tensor([0, 1, 1], dtype=dtype)}, temperature=0.7)
    assert none["loss_mask"].sum(1).tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"advantage": torch.zeros(3)}, "unknown target `advantage`; a batch may hold input_ids"),
        ({"advantages": torch.zeros(2)}, r"target `advantages` must be \[3\] or \[3, 3\], got \[2\]"),
        ({"advantages": torch.zeros(3, 2)}, r"must be \[3\] or \[3, 3\], got \[3, 2\]"),
        ({"advantages": torch.zeros(3, 4)}, r"must be \[3\] or \[3, 3\], got \[3, 4\]"),  # whole sequences
        ({"group": torch.zeros(3, 3)}, r"target `group` must be \[3\], got \[3, 3\]"),
        (
            {"advantages": torch.tensor([0, 0, math.inf])},
            "target `advantages` of completion 2 .* no finite number",
        ),
        ({"loss_mask": torch.ones(2)}, r"target `loss_mask` must be \[3\] or \[3, 3\], got \[2\]"),
        (
            {"loss_mask": torch.tensor([1, 1, 0.5])},
            "target `loss_mask` is 1 where .*; completion 2 of the batch has 0.5",
        ),
        ({"loss_mask": torch.full((3, 3), math.nan)}, "completion 0 of the batch has nan"),
    ],
)
def test_targets_that_do_not_fit_are_refused_by_name(wrong, words):
    with pytest.raises(TrainerError, match=words):
        assemble(GROUPS, wrong, temperature=1.0)


@pytest.mark.parametrize("reward", [math.nan, math.inf, 1e39, -1e200, 1.7e308])
def test_a_reward_that_is_no_number_is_refused_by_name(reward):
    with pytest.raises(TrainerError, match="completion 1 of prompt 'bad'"):
        targets([group((1,), [completion((2,))] * 2, (0.0, reward), uid="bad")])


def test_missing_scores_are_refused():
    with pytest.raises(TrainerError, match="2 completions and 0 scores"):
        targets([replace(GROUPS[0], scores=())])


def test_no_examples_are_refused():
    with pytest.raises(TrainerError, match="at least one example"):
        assemble_examples([])


@pytest.mark.parametrize("kind", sorted(set(Advantage) - {Advantage.MAX_RL, Advantage.OTB}))
def test_advantages_of_the_largest_rewards_are_float32_numbers(kind):
    """As they were not beyond 1e38: Dr. GRPO's became infinite, GRPO's 0 or NaN."""
    groups = [group((4,), [completion((3,)), completion((3,))], (1e38, -1e38))]
    better, worse = targets(groups, kind)["advantages"].float().tolist()
    assert math.isfinite(better)
    assert math.isfinite(worse)
    assert better > 0 >= worse


def test_a_nan_of_the_sampler_is_named_before_it_is_trained_on():
    bad = Completion.of(
        request_id="r",
        token_ids=(7, 8),
        logprobs=(-0.5, math.nan),
        policy_versions=(3, 3),
        finish=Finish.STOP,
    )
    scored = [group((4,), [completion((3,)), bad], (1.0, 0.0), uid="odd")]
    with pytest.raises(TrainerError, match="NaN as a log-probability in a completion of prompt 'odd'"):
        assemble(scored, targets(scored), temperature=1.0)


async def test_the_event_loop_goes_on_while_the_batch_is_made():
    went_on = threading.Event()

    def targets_of(groups):
        assert went_on.wait(60), "the event loop waits for the batch"
        return {"advantages": torch.ones(1)}

    groups = [group((1,), [completion((5, 6))], (1.0,))]
    asyncio.get_running_loop().call_later(0.01, went_on.set)
    batch = await assembled(groups, targets_of, 1.0)
    assert batch["input_ids"].tolist() == [[1, 5, 6]]


def test_rewards_that_are_neither_right_nor_wrong_have_no_accuracy():
    assert [is_correct(reward, None) for reward in (0.0, 1.0, 0.5, -1.0)] == [False, True, None, None]
    assert [is_correct(reward, 0.5) for reward in (0.4, 0.5, 3.0)] == [False, True, True]
    scores = [Score(reward=1.0, correct=True), Score(reward=0.0, correct=False)]
    assert reduce_metrics(accuracy("a", scores)) == {"a": 0.5}
    assert accuracy("a", [*scores, Score(reward=0.4)]) == accuracy("a", []) == []
