# pyright: basic
"""What every policy loss is held to: a reference from its paper in plain Python, float64, and invariances of any batch.

A reference is told log-probs `new`, the same again as `fixed`, for what stands under a stop-gradient, `old`, `advantages`, `mask`, which
are arrays [B, T], and the algorithm's settings. It returns the loss of the whole batch.
"""

import math
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from tensordict import TensorDict

from offbeat_engine import LossScale
from offbeat_trainer import StepShape
from offbeat_trainer.algorithms.policy_loss import CHOSEN
from offbeat_trainer.algorithms.trial import trial
from offbeat_trainer.config import UNUSED, Aggregation

B, T, EMPTY = 8, 7, (2, 5)
STEP = 1e-6


@dataclass(frozen=True)
class Arrays:
    new: np.ndarray
    old: np.ndarray
    advantages: np.ndarray
    mask: np.ndarray

    def rows(self, rows):
        return Arrays(*(getattr(self, name)[rows] for name in ("new", "old", "advantages", "mask")))


def draw(seed, spread, per_sequence=True):
    """Random tokens with holes in the mask and rows without any; `spread` is that of the log ratio, in nats."""
    random = np.random.default_rng(seed)
    mask = random.random((B, T)) < 0.7
    mask[:, 0] = mask[list(EMPTY)] = False
    mask[0, 1] = True
    new = -random.random((B, T)) * 2 - 0.05
    old = np.minimum(new + spread * random.standard_normal((B, T)), -1e-3)
    advantages = random.standard_normal((B, 1 if per_sequence else T)) * np.ones((B, T))
    return Arrays(new, old, advantages, mask)


def batch_of(algorithm, arrays, dtype=torch.float64):
    """Return what the loss is called with; the ratio is taken against `old`, and no weight stands before it."""
    told = {"rollout_logprobs": arrays.old, "old_logprobs": arrays.old, "advantages": arrays.advantages}
    batch = TensorDict(
        {
            "loss_mask": torch.tensor(arrays.mask),
            **{key: torch.tensor(one).to(dtype) for key, one in told.items()},
        },
        batch_size=[len(arrays.mask)],
    )
    logprobs = torch.tensor(arrays.new).to(dtype)
    if algorithm.chooses:
        batch[CHOSEN.key] = algorithm.choose(batch, logprobs)
    return TensorDict({"logprobs": logprobs.requires_grad_()}, batch_size=[len(arrays.mask)]), batch


def scale_of(arrays):
    return LossScale(num_tokens=int(arrays.mask.sum()), num_sequences=len(arrays.mask))


def answer(algorithm, predictions, batch, scale):
    """Return loss, gradient and sums."""
    output = algorithm.loss_fn()(predictions, batch, scale)
    (gradient,) = torch.autograd.grad(output.loss, predictions["logprobs"])
    return output.loss.item(), gradient, output.sums


def check_formula(algorithm, reference, arrays, config=None):
    """Value and gradient are those of the reference: finite differences of `new` alone, for a stop-gradient does not move."""
    config = algorithm.config if config is None else config
    loss, gradient, _ = answer(algorithm, *batch_of(algorithm, arrays), scale_of(arrays))

    def value(new):
        return reference(new, arrays.new, arrays.old, arrays.advantages, arrays.mask, config)

    wanted = np.zeros((B, T))
    for place in np.argwhere(arrays.mask):
        step = np.zeros((B, T))
        step[tuple(place)] = STEP
        wanted[tuple(place)] = (value(arrays.new + step) - value(arrays.new - step)) / (2 * STEP)
    np.testing.assert_allclose(loss, value(arrays.new), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(gradient.numpy(), wanted, rtol=1e-5, atol=1e-7)


def planted(algorithm, moved):
    """Yield the algorithm with one error each: the sign, A without its sign, each setting of `moved`, each other normaliser."""
    formula, config = type(algorithm).formula, algorithm.config

    def sign(*arguments):
        plain = formula(*arguments)
        return replace(plain, loss=-plain.loss)

    def absolute(ratio, advantages, *rest):
        return formula(ratio, advantages.abs(), *rest)

    for wrong in (sign, absolute):
        yield wrong.__name__, with_formula(algorithm, wrong)
    changed = dict(moved) | {
        f"aggregation {one}": one for one in Aggregation if one is not config.aggregation
    }
    for name, value in changed.items():
        yield name, replace(algorithm, config=replace(config, **{name.split()[0]: value}))


def with_formula(algorithm, formula):
    kind = type(algorithm)
    wrong = type(kind.__name__, (kind,), {"formula": staticmethod(formula)})
    return wrong(config=algorithm.config, step=algorithm.step)


def caught(wrong, reference, arrays, config):
    """Return whether `check_formula` sees on one of `arrays` that `wrong` is not the reference of `config`."""
    for one in arrays:
        try:
            check_formula(wrong, reference, one, config)
        except AssertionError:
            return True
    return False


def check_planted(algorithm, reference, arrays, moved):
    """Every planted error is seen."""
    for name, wrong in planted(algorithm, moved):
        seen = caught(wrong, reference, arrays, algorithm.config)
        assert seen, f"{type(algorithm).__name__}: nobody saw that {name} is wrong"


def check_invariances(algorithm, arrays):
    """Micro-batches, order, padding and what is outside the mask change neither value nor gradient, nor what is chosen."""
    predictions, batch = batch_of(algorithm, arrays)
    scale = scale_of(arrays)
    loss, gradient, sums = answer(algorithm, predictions, batch, scale)
    order = torch.randperm(B, generator=torch.Generator().manual_seed(7))
    for parts in ([order], list(order.split(1)), list(order.split(3))):
        found = [answer(algorithm, predictions[part], batch[part], scale) for part in parts]
        assert math.isclose(sum(one[0] for one in found), loss, rel_tol=1e-9, abs_tol=1e-12)
        torch.testing.assert_close(torch.cat([one[1] for one in found]), gradient[torch.cat(parts)])
        for key, total in sums.items():
            torch.testing.assert_close(sum(one[2][key] for one in found), total)
    shuffled = batch_of(algorithm, arrays.rows(order.numpy()))[1]
    wide = Arrays(*(np.pad(getattr(arrays, name), ((0, 0), (0, 3))) for name in Arrays.__dataclass_fields__))
    outside = ~wide.mask
    for name in ("new", "old", "advantages"):
        getattr(wide, name)[outside] = np.nan
    padded = batch_of(algorithm, wide)
    if algorithm.chooses:
        noise = torch.randn(B, T, generator=torch.Generator().manual_seed(0))
        rounded = predictions["logprobs"].detach() * (1 + 1e-7 * noise)  # as other ranks and micro-batches do
        assert torch.equal(algorithm.choose(batch, rounded), batch[CHOSEN.key])
        assert torch.equal(shuffled[CHOSEN.key], batch[CHOSEN.key][order])
        assert torch.equal(padded[1][CHOSEN.key][:, :T], batch[CHOSEN.key])
    again = answer(algorithm, *padded, scale)
    assert math.isclose(again[0], loss, rel_tol=1e-9, abs_tol=1e-12)
    torch.testing.assert_close(again[1][:, :T], gradient)
    assert not again[1][torch.tensor(outside)].any()


def check_on_policy(algorithm, arrays):
    """Of fresh tokens, as two engines differ in float32: every ratio is 1 within 1e-4, and the gradient that of -A log pi."""
    noise = np.random.default_rng(0).uniform(-1e-5, 1e-5, (B, T))
    fresh = replace(arrays, old=arrays.new + noise)
    predictions, batch = batch_of(algorithm, fresh, torch.float32)
    output = algorithm.loss_fn()(predictions, batch, scale_of(fresh))
    assert abs(output.maxes["policy/ratio_max"].item() - 1) < 1e-4
    (gradient,) = torch.autograd.grad(output.loss, predictions["logprobs"])
    plain = torch.tensor(arrays.advantages * arrays.mask)
    lengths = torch.tensor(arrays.mask.sum(1).clip(1))[:, None]
    divisor = {
        Aggregation.TOKEN_MEAN: arrays.mask.sum(),
        Aggregation.SEQ_MEAN_TOKEN_SUM: B,
        Aggregation.SEQ_MEAN_TOKEN_MEAN: B * lengths,
    }[algorithm.config.aggregation]
    kept = ~batch[CHOSEN.key] if algorithm.chooses else torch.tensor(arrays.mask)
    torch.testing.assert_close((gradient * kept).double(), -plain / divisor * kept, rtol=2e-4, atol=1e-7)
    assert (gradient * kept).any()


def check_extremes(algorithm, arrays):
    """However far the old policy is, loss and gradient are finite; a micro-batch without a token adds nothing."""
    for gap in (-1e4, -100.0, 100.0, 1e4):
        loss, gradient, _ = answer(
            algorithm,
            *batch_of(algorithm, replace(arrays, old=arrays.new + gap), torch.float32),
            scale_of(arrays),
        )
        assert math.isfinite(loss)
        assert gradient.isfinite().all()
    predictions, batch = batch_of(algorithm, arrays)
    assert answer(algorithm, predictions[:0], batch[:0], scale_of(arrays))[0] == 0


def check_class(kind):
    """It has a page of three paragraphs and defaults that hold; it learns in a trial, and looks at who sampled."""
    name, formula, when = kind.__doc__.strip().split("\n\n")
    assert "(arXiv " in name.split(":")[0]
    assert formula.strip().startswith("loss = ")
    assert when.strip().startswith("Use it when ")
    assert " and not when " in " ".join(when.split())
    for updates in (1, 2):
        algorithm = kind(config=kind.Config(), step=StepShape(updates_per_step=updates))
        assert algorithm.check() == []
        assert trial(algorithm)
    unused = [item.name for item in fields(kind.Config) if item.metadata == UNUSED]
    for setting in unused:
        value = 3.0 if setting == "dual_clip" else 0.5
        [refusal] = replace(algorithm, config=replace(algorithm.config, **{setting: value})).check()
        assert (refusal.setting, "has no use for it" in refusal.reason) == (f"algorithm.{setting}", True)


def check_all(algorithm, reference, arrays, moved):
    """Hold one loss to everything; see each function."""
    for one in arrays:
        check_formula(algorithm, reference, one)
        check_invariances(algorithm, one)
        check_on_policy(algorithm, one)
        check_extremes(algorithm, one)
    check_planted(algorithm, reference, arrays, moved)
