"""A beginning that sequences have in common is computed once, and nothing else changes."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat_engine import (
    Fsdp2Config,
    ModelConfig,
    SftLoss,
    World,
    engine_class,
    plan_micro_batches,
    train_batch,
)
from offbeat_engine.fsdp2.attention.packed import plan_padded
from offbeat_engine.fsdp2.attention.packing import RowInputs, _owners, lay_out
from offbeat_engine.fsdp2.attention.varlen import plan_varlen
from offbeat_engine.testing import make_tiny_model, reference_logprobs, relative_error
from offbeat_engine.testing.reference import load_reference

CPU = torch.device("cpu")
PLANS = {"sdpa": plan_padded, "varlen": plan_varlen}
kernels = pytest.mark.parametrize("attention", PLANS)
ROWS = st.lists(st.lists(st.integers(0, 2), max_size=7), min_size=1, max_size=9)


@given(ROWS)
def test_every_prefix_is_computed_once_by_a_row_that_has_it(rows):
    width = max(1, *map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    fed = torch.arange(width)[None] < torch.tensor([len(row) for row in rows])[:, None]
    own, owner = _owners(ids[..., None], fed)
    prefixes = {tuple(row[: t + 1]) for row in rows for t in range(len(row))}
    assert int(own.sum()) == len(prefixes)
    assert {tuple(rows[r][: t + 1]) for r, t in own.nonzero().tolist()} == prefixes
    for r, t in fed.nonzero().tolist():
        assert rows[int(owner[r, t])][: t + 1] == rows[r][: t + 1]
        assert bool(own[owner[r, t], t])


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), max_size=40), st.integers(1, 90))
def test_a_plan_by_groups_holds_everything_and_parts_as_few_groups_as_it_has_cuts(pairs, max_tokens):
    lengths, groups = [length for length, _ in pairs], [group for _, group in pairs]
    plan = plan_micro_batches(lengths, max_tokens=max_tokens, groups=groups)
    order = [index for part in plan for index in part]
    assert sorted(order) == list(range(len(pairs)))
    changes = sum(groups[a] != groups[b] for a, b in pairwise(order))
    assert changes == max(0, len(set(groups)) - 1)
    assert all(
        sum(lengths[i] for i in part) <= max_tokens or len([i for i in part if lengths[i]]) == 1
        for part in plan
    )


def group_batch(num_groups=3, size=4, prompt=9, vocab=64):
    """Groups with a prompt in common and completions of different lengths; two completions begin alike."""
    generator = torch.Generator().manual_seed(5)
    rows, masks, groups = [], [], []
    for group in range(num_groups):
        start = torch.randint(1, vocab, (prompt + group,), generator=generator).tolist()
        for index in range(size):
            rest = torch.randint(1, vocab, (3 + 2 * index,), generator=generator).tolist()
            rest = rows[-1][len(start) : len(start) + 2] + rest if index == 2 else rest
            rows.append(start + rest)
            masks.append([False] * len(start) + [True] * len(rest))
            groups.append(group)
    width = max(map(len, rows))
    return train_batch(
        input_ids=torch.tensor([row + [0] * (width - len(row)) for row in rows]),
        lengths=torch.tensor([len(row) for row in rows]),
        loss_mask=torch.tensor([mask + [False] * (width - len(mask)) for mask in masks]),
        group=torch.tensor(groups),
    )


def new_engine(path, world, **settings):
    engine = engine_class("fsdp2")(Fsdp2Config(model=ModelConfig(path=path), **settings), world)
    engine.init_model()
    engine.set_loss_fn(SftLoss())
    return engine


def step(world, path, **settings):
    """Return log-probs in the order of the batch, the loss, and gradients by name."""
    engine = new_engine(path, world, **settings)
    share = engine.shard_data(group_batch())
    with engine.train_mode():
        engine.optimizer_zero_grad()
        predictions, loss, _ = engine.forward_backward_step(share)
        gradients = {name: tensor.clone() for name, tensor in engine.named_gradients()}
    return engine.unshard_data(predictions)["logprobs"], loss, gradients


def step_with(world, path, attention):
    """As `step`, for the ranks, who import a function of this file."""
    return step(world, path, attention=attention)


def check(path, logprobs, loss, gradients):
    model, batch = load_reference(path), group_batch()
    wanted = reference_logprobs(model, batch)["logprobs"]
    expected = -wanted.sum() / batch["loss_mask"].sum()
    expected.backward()
    assert float((logprobs - wanted.detach()).abs().max()) <= 1e-5
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    for name, param in model.named_parameters():
        if name in gradients:
            assert relative_error(gradients[name], param.grad) <= 1e-4, name
    assert len(gradients) == sum(1 for _ in model.parameters())


@kernels
def test_sharing_feeds_fewer_tokens_and_changes_no_number(tiny, attention):
    batch = group_batch()
    shared, plain = (lay_out(batch, RowInputs(PLANS[attention], share), CPU) for share in (True, False))
    fed = plain.model_inputs["input_ids"].numel()
    saved = sum(3 * (9 + group) for group in range(3))  # three of four prompts of each group, and more
    assert shared.model_inputs["input_ids"].numel() <= fed - saved
    assert shared.model_inputs["packed"].shared
    check(tiny, *step(World(), tiny, attention=attention))


@kernels
def test_where_little_is_shared_rows_are_packed_plainly(attention):
    layout = lay_out(group_batch(num_groups=3, size=1), RowInputs(PLANS[attention], share=True), CPU)
    assert not layout.model_inputs["packed"].shared


@kernels
def test_groups_that_are_cut_by_the_budget_or_shared_among_ranks_come_to_the_same(tiny, two_ranks, attention):
    check(tiny, *step(World(), tiny, attention=attention, micro_batch_tokens=60))
    for result in two_ranks.run(step_with, tiny, attention):
        check(tiny, *result)


@kernels
def test_layers_with_a_window_share_beginnings_too(tmp_path, attention):
    path = make_tiny_model(tmp_path, family="mistral", sliding_window=7)
    check(path, *step(World(), path, attention=attention))


def test_a_token_that_is_no_longer_common_is_not_shared():
    """The defect this feature could have: one sequence reads the token of another."""
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 8]])
    own, owner = _owners(ids[..., None], torch.ones_like(ids, dtype=torch.bool))
    assert own.tolist() == [[True, True, True, True], [False, False, True, True]]
    assert owner[1].tolist() == [0, 0, 1, 1]
