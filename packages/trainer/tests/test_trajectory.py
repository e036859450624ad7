"""A trajectory of several turns, by hand: what is trained, what is not, and what each token earned."""

import numpy as np
import pytest

from offbeat_engine import check_batch
from offbeat_rollout import Completion, Finish
from offbeat_trainer.algorithms.ppo import REWARDS, Ppo
from offbeat_trainer.config import PpoConfig
from offbeat_trainer.data.assemble import assemble, group_metrics, staleness_metrics
from offbeat_trainer.data.metrics import reduce_metrics
from offbeat_trainer.data.types import Group, Limit, Prompt, Score, Trajectory, Turn, oldest_version, spans_of


def completion(*tokens, versions=None):
    return Completion.of(
        request_id="r", token_ids=tokens, logprobs=[-float(token) for token in tokens],
        policy_versions=versions or [4] * len(tokens), finish=Finish.STOP,
    )  # fmt: skip


def turn(observed, made, reward=0.0):
    return Turn(completion=made, observed=np.array(observed, np.int32), reward=reward)


TWO = Trajectory(
    turns=(turn([], completion(7, 8), reward=0.25), turn([5, 5, 5], completion(9, 6, versions=[4, 6]))),
    finish=Limit.TURNS,
)
PLAIN = Trajectory.of(completion(3))


def test_the_arrays_of_two_turns():
    assert TWO.token_ids.tolist() == [7, 8, 5, 5, 5, 9, 6]
    assert TWO.token_ids.dtype == np.int32
    assert TWO.logprobs.tolist() == [-7, -8, 0, 0, 0, -9, -6]
    assert TWO.logprobs.dtype == np.float32
    assert TWO.trained.tolist() == [True, True, False, False, False, True, True]
    assert TWO.spans == ((4, 0, 2), (4, 5, 6), (6, 6, 7))
    assert TWO.policy_versions.tolist() == [4, 4, -1, -1, -1, 4, 6]
    assert (TWO.num_tokens, TWO.num_trained, TWO.is_plain) == (7, 4, False)


def test_one_completion_is_a_trajectory_that_copies_nothing():
    made = completion(1, 2, 3)
    one = Trajectory.of(made)
    assert one.token_ids is made.token_ids
    assert one.logprobs is made.logprobs
    assert (one.spans, one.finish, one.completion) == (made.spans, made.finish, made)
    assert one.trained.all()


def test_a_trajectory_without_turns_has_no_tokens():
    none = Trajectory(turns=(), finish=Limit.SECONDS)
    assert (none.num_tokens, none.token_ids.tolist(), none.spans, none.trained.tolist()) == (0, [], (), [])
    assert none.rewards(1.0).tolist() == []


@pytest.mark.parametrize(
    ("trajectory", "total", "rewards"),
    [
        (TWO, 1.0, [0, 0.25, 0, 0, 0, 0, 0.75]),
        (TWO, 0.25, [0, 0.25, 0, 0, 0, 0, 0]),
        (PLAIN, -2.0, [-2.0]),
        (Trajectory(turns=(turn([], completion()), turn([1], completion(2), reward=1.0)), finish=Finish.STOP), 3.0, [0, 3.0]),
    ],
)  # fmt: skip
def test_what_tokens_earn_adds_up_to_the_score(trajectory, total, rewards):
    assert trajectory.rewards(total).tolist() == rewards


def test_trajectories_are_equal_if_all_of_them_is():
    def other(observed=(5, 5, 5), reward=0.25, finish=Limit.TURNS, last=6):
        turns = (
            turn([], completion(7, 8), reward=reward),
            turn(observed, completion(9, last, versions=[4, 6])),
        )
        return Trajectory(turns=turns, finish=finish)

    assert other() == TWO
    assert hash(other()) == hash(TWO)
    for different in (other(observed=(5, 5)), other(reward=0.5), other(finish=Finish.STOP), other(last=2)):
        assert different != TWO


GROUP = Group(
    prompt=Prompt(uid="p", text="", token_ids=(1, 2)),
    trajectories=(TWO, PLAIN),
    scores=(Score(reward=1.0, correct=True), Score(reward=0.0, correct=False)),
)


def test_a_batch_trains_what_was_sampled_and_reads_the_rest():
    algorithm = Ppo(config=PpoConfig())
    batch = assemble([GROUP], algorithm.targets([GROUP]), temperature=1.0)
    check_batch(batch)
    assert batch["input_ids"].tolist() == [[1, 2, 7, 8, 5, 5, 5, 9, 6], [1, 2, 3, 0, 0, 0, 0, 0, 0]]
    assert batch["loss_mask"].int().tolist() == [[0, 0, 1, 1, 0, 0, 0, 1, 1], [0, 0, 1, 0, 0, 0, 0, 0, 0]]
    assert batch["rollout_logprobs"][0].tolist() == [0, 0, -7, -8, 0, 0, 0, -9, -6]
    assert batch["policy_version"][0].tolist() == [-1, -1, 4, 4, -1, -1, -1, 4, 6]
    assert batch[REWARDS.key][0].tolist() == [0, 0, 0, 0.25, 0, 0, 0, 0, 0.75]
    assert batch["lengths"].tolist() == [9, 3]


def test_targets_reach_trained_tokens_alone():
    import torch

    each_BC = torch.arange(14, dtype=torch.float32).reshape(2, 7)
    each_BC[0, 2:5] = torch.nan  # of what the environment said nothing is learned: nobody looks at it
    batch = assemble([GROUP], {"advantages": each_BC}, temperature=1.0)
    assert batch["advantages"].tolist() == [[0, 0, 0, 1, 0, 0, 0, 5, 6], [0, 0, 7, 0, 0, 0, 0, 0, 0]]
    spread = assemble([GROUP], {"advantages": torch.tensor([0.5, -1.0])}, temperature=1.0)
    assert spread["advantages"].tolist() == [
        [0, 0, 0.5, 0.5, 0, 0, 0, 0.5, 0.5],
        [0, 0, -1, 0, 0, 0, 0, 0, 0],
    ]


def test_staleness_counts_trained_tokens_only():
    ages = reduce_metrics(staleness_metrics([GROUP], 6))
    assert ages["staleness/2_fraction"] == pytest.approx(4 / 5)
    assert ages["staleness/0_fraction"] == pytest.approx(1 / 5)
    assert (ages["staleness/max"], ages["trajectory/versions_max"]) == (2, 2)
    assert oldest_version([TWO, PLAIN]) == 4
    assert spans_of(TWO) == ((4, 2), (4, 1), (6, 1))


def test_metrics_of_turns():
    found = reduce_metrics(group_metrics([GROUP]))
    assert found["tokens/generated"] == 5
    assert found["completion/length_mean"] == 2.5
    assert (found["trajectory/turns_mean"], found["trajectory/turns_max"]) == (1.5, 2)
    assert (found["trajectory/turns_extended"], found["trajectory/turns_forked"]) == (1, 0)
    assert found["trajectory/observed_tokens_mean"] == 1.5
    assert (found["trajectory/out_of_turns_fraction"], found["trajectory/out_of_seconds_fraction"]) == (
        0.5,
        0,
    )
