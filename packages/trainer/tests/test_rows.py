"""A trajectory of several rows, by hand: a history that was edited is trained as sequences of their own, however many there are."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat_engine import check_batch
from offbeat_rollout import Completion, Finish
from offbeat_trainer.algorithms.advantages import by_group, dr_grpo, turn_advantages
from offbeat_trainer.algorithms.ppo import REWARDS, Ppo
from offbeat_trainer.algorithms.roles import split_evenly
from offbeat_trainer.config import PpoConfig
from offbeat_trainer.data.assemble import assemble, group_metrics, staleness_metrics
from offbeat_trainer.data.metrics import reduce_metrics
from offbeat_trainer.data.types import Group, Prompt, Score, Trajectory, Turn
from offbeat_trainer.errors import TrainerError
from offbeat_trainer.loops.journal import pack, unpack


def completion(*tokens, version=4, experts=None):
    made = Completion.of(
        request_id="r", token_ids=tokens, logprobs=[-float(token) for token in tokens],
        policy_versions=[version] * len(tokens), finish=Finish.STOP,
    )  # fmt: skip
    return replace(made, routed_experts=experts)


def turn(observed, made, reward=0.0, context=None):
    context = None if context is None else np.array(context, np.int32)
    return Turn(completion=made, observed=np.array(observed, np.int32), reward=reward, context=context)


# Two turns, then the history is cut to [40, 41]: two more turns follow that.
EDITED = Trajectory(
    turns=(
        turn([], completion(7, 8), reward=0.25),
        turn([5], completion(9)),
        turn([], completion(3), context=[40, 41]),
        turn([6, 6], completion(2, 1, version=5), reward=0.5),
    ),
    finish=Finish.STOP,
)
PLAIN = Trajectory.of(completion(3, 4))
GROUPS = [
    Group(
        prompt=Prompt(uid="p", text="", token_ids=(30, 31, 32)),
        trajectories=(EDITED, PLAIN),
        scores=(Score(reward=1.0), Score(reward=0.0)),
    )
]


def test_rows_part_where_a_turn_has_a_context():
    first, second = EDITED.rows
    assert (first.context, first.token_ids.tolist()) == (None, [7, 8, 5, 9])
    assert (second.context.tolist(), second.token_ids.tolist()) == ([40, 41], [3, 6, 6, 2, 1])
    assert second.spans == ((4, 0, 1), (5, 3, 5))
    assert EDITED.token_ids.tolist() == [7, 8, 5, 9, 3, 6, 6, 2, 1]
    assert [row.turns for row in PLAIN.rows] == [PLAIN.turns]
    assert len(Trajectory(turns=(), finish=Finish.LENGTH).rows) == 1
    alone = Trajectory(turns=(turn([], completion(3), context=[40]),), finish=Finish.STOP)
    assert (len(alone.rows), alone.rows[0].context.tolist(), alone.is_plain) == (1, [40], False)


def test_a_batch_has_a_sequence_for_each_row_and_targets_of_trajectories():
    batch = assemble(GROUPS, {"advantages": torch.tensor([0.5, -0.5])}, temperature=1.0)
    check_batch(batch)
    assert batch["input_ids"].tolist() == [
        [30, 31, 32, 7, 8, 5, 9],
        [40, 41, 3, 6, 6, 2, 1],
        [30, 31, 32, 3, 4, 0, 0],
    ]
    assert batch["loss_mask"].int().tolist() == [
        [0, 0, 0, 1, 1, 0, 1],
        [0, 0, 1, 0, 0, 1, 1],
        [0, 0, 0, 1, 1, 0, 0],
    ]
    assert batch["policy_version"].tolist()[1] == [-1, -1, 4, -1, -1, 5, 5]
    assert batch["group"].tolist() == [0, 0, 0]
    assert (
        batch["advantages"].tolist() == (batch["loss_mask"] * torch.tensor([[0.5], [0.5], [-0.5]])).tolist()
    )


def test_targets_of_tokens_go_to_the_rows_that_these_are_in():
    per_token = torch.arange(18, dtype=torch.float64).view(2, 9)
    batch = assemble(GROUPS, {"advantages": per_token}, temperature=1.0)
    assert batch["advantages"].tolist() == [
        [0, 0, 0, 0, 1, 0, 3],
        [0, 0, 4, 0, 0, 7, 8],
        [0, 0, 0, 9, 10, 0, 0],
    ]
    kept = assemble(GROUPS, {"loss_mask": torch.tensor([1.0, 0.0])}, temperature=1.0)
    assert kept["loss_mask"].sum(1).tolist() == [3, 3, 0]
    for wrong in (torch.zeros(3), torch.zeros(2, 5)):
        with pytest.raises(TrainerError, match=r"must be \[2\] or \[2, 9\], of trajectories"):
            assemble(GROUPS, {"advantages": wrong}, temperature=1.0)


def test_a_row_earns_what_came_of_it():
    """GAE sees sequences: the first row led to the second, and is worth what that one earned."""
    assert EDITED.rewards(1.0).tolist() == [0, 0.25, 0, 0.75, 0, 0, 0, 0, 0.75]
    batch = assemble(GROUPS, Ppo(config=PpoConfig()).targets(GROUPS), temperature=1.0)
    assert batch[REWARDS.key].sum(1).tolist() == [1.0, 0.75, 0.0]


def test_turn_rewards_are_credited_over_rows():
    advantages = turn_advantages(GROUPS, lambda samples: by_group(samples, dr_grpo))
    # Only the first turn has another to be compared with: 1.0 and 0.0 to go.
    assert advantages.tolist() == [[0.5, 0.5, 0, 0, 0, 0, 0, 0, 0], [-0.5, -0.5, 0, 0, 0, 0, 0, 0, 0]]
    assert assemble(GROUPS, {"advantages": advantages}, temperature=1.0)["advantages"].sum(1).tolist() == [
        1,
        0,
        -1,
    ]


def test_experts_go_with_the_row_whose_prompt_they_count():
    def routed(count, first):
        return np.arange(first, first + count, dtype=np.int16).reshape(count, 1, 1)

    edited = Trajectory(
        turns=(
            turn([], completion(7, 8, experts=routed(4, 0))),
            turn([], completion(3, 2, experts=routed(3, 50)), context=[40, 41]),
        ),
        finish=Finish.STOP,
    )
    group = replace(GROUPS[0], trajectories=(edited,), scores=(Score(reward=1.0),))
    batch = assemble([group], {}, temperature=1.0)
    assert batch["routed_experts"][..., 0].tolist() == [[0, 1, 2, 3, -1], [50, 51, 52, -1, -1]]


def test_metrics_count_trajectories_and_say_how_many_rows_they_have():
    found = reduce_metrics(group_metrics(GROUPS))
    assert (found["trajectory/rows_mean"], found["trajectory/turns_mean"]) == (1.5, 2.5)
    assert (found["trajectory/turns_extended"], found["trajectory/turns_forked"]) == (2, 1)
    assert (found["completion/length_mean"], found["tokens/generated"]) == (4.0, 8.0)
    assert reduce_metrics(staleness_metrics(GROUPS, 5))["staleness/1_fraction"] == 6 / 8
    alone = replace(GROUPS[0], trajectories=(PLAIN,), scores=(Score(reward=0.0),))
    assert "trajectory/rows_mean" not in reduce_metrics(group_metrics([alone]))


@given(st.lists(st.lists(st.none() | st.lists(st.integers(0, 99), max_size=3), max_size=3), max_size=3))
def test_a_journal_gives_contexts_back(contexts):
    trajectories = tuple(
        Trajectory(
            turns=tuple(
                turn([8] * place, completion(place, 2), 0.5, context) for place, context in enumerate(one)
            ),
            finish=Finish.STOP,
        )
        for one in contexts
    )
    assert unpack(pack(trajectories)) == trajectories


@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_any_number_of_rows_is_cut_into_mini_batches_of_nearly_equal_size(num_parts):
    batch = assemble([GROUPS[0], *GROUPS, *GROUPS], {}, temperature=1.0)
    sizes = [len(part["lengths"]) for part in split_evenly(batch, num_parts)]
    assert sum(sizes) == 9
    assert max(sizes) - min(sizes) <= 1
