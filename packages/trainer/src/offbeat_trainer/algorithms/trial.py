"""A trial of an algorithm on made-up groups and predictions: what is missing is found before anything starts."""

from __future__ import annotations

import math
import pickle
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from offbeat_engine import (
    LossOutput,
    LossScale,
    Predictions,
    StepContext,
    StepStats,
    TrainBatch,
    check_batch,
    units_of,
)
from offbeat_engine.batch import select_rows
from offbeat_rollout import Completion, Finish
from offbeat_trainer.algorithms.roles import POLICY, Role
from offbeat_trainer.data.assemble import assemble
from offbeat_trainer.data.metrics import reduce_metrics
from offbeat_trainer.data.types import Group, Prompt, Score, Trajectory
from offbeat_trainer.errors import PlanRefused, TrainerError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from offbeat_engine import Engine, LossFn
    from offbeat_trainer.algorithms.interface import Algorithm
    from offbeat_trainer.config import AlgorithmConfig

_TOKENS = 3
_LATE = 1_000_000  # a step at which every warm-up is over
_ROUNDING = 1e-4


def trial(algorithm: Algorithm[AlgorithmConfig]) -> bool:
    """Send `algorithm` through pickle and let it learn a first and a late step from made-up groups, on engines of random predictions.

    Every loss is called on whole mini-batches and on parts of them, with its gradient.

    Returns:
        Whether what the policy learns depends on the sampler's log-probs, as it must where tokens are older than the weights they
        train; True where that was not tried: it learns from written rows, or asks its engines for more than `Role` does.

    Raises:
        PlanRefused: it does not come out as it went in.
        Exception: what it raises, or what is wrong with its targets or its losses.
    """
    if pickle.loads(pickle.dumps(algorithm)) != algorithm:
        raise PlanRefused("it comes out of pickle as another; ranks would not learn what the driver asks for")
    if algorithm.Config.written_rows:
        return True  # it makes batches of a task's rows, and these are not known here
    baseline = (Score(reward=0.5),) if algorithm.baseline() else ()
    numbers = range(2 * algorithm.step.updates_per_step)
    groups = [replace(_group(number, algorithm.step.group_size), baseline=baseline) for number in numbers]
    for group in groups:
        if not isinstance(why := algorithm.keeps(group), str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TrainerError(
                f"`keeps` returns why a group is left out, or an empty text to train it, got {why!r:.80}"
            )
    batch = assemble(groups, algorithm.targets(groups), temperature=1.0)
    specs = algorithm.roles().items()
    engines = {name: _RandomEngine(spec.head, seed) for seed, (name, spec) in enumerate(specs)}
    roles = {name: Role(cast("Engine", engine)) for name, engine in engines.items()}
    try:
        for step in (0, _LATE):
            for role in roles.values():
                role.step = step
            algorithm = _stepped(algorithm, reduce_metrics(algorithm.learn(roles, batch.clone())))
    except _NotTriedError:
        return True
    policy = engines[POLICY]
    return policy.reads_sampler or not policy.trained


def _stepped(algorithm: Algorithm[AlgorithmConfig], metrics: dict[str, float]) -> Algorithm[AlgorithmConfig]:
    """Return the algorithm of the step after one that came to `metrics`; its state must be what a file of JSON can hold."""
    state = dict(algorithm.next_state(metrics))
    for name, value in state.items():
        if not isinstance(value, int | float) or not math.isfinite(value):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TrainerError(f"`next_state` returns finite numbers by name, got {name!r}: {value!r:.80}")
    return algorithm.at(state)


class _NotTriedError(Exception):
    """An algorithm asks its engine for what only a real one has."""


class _RandomEngine:
    """What `Role` and the roles need of an `Engine` of one rank. Its predictions are random, and no step changes them."""

    def __init__(self, head: str, seed: int) -> None:
        self.reads_sampler = self.trained = False
        self._names = ("values",) if head == "value" else ("logprobs", "entropy")
        self._random = torch.Generator().manual_seed(seed)
        self._loss_fn: LossFn | None = None

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever an algorithm looks for
        raise _NotTriedError(name)

    def train_mode(self) -> AbstractContextManager[None]:
        return nullcontext()

    eval_mode = base_mode = train_mode

    def shard_data(self, data: TrainBatch) -> TrainBatch:
        return data.copy()

    def unshard_data(self, data: Predictions) -> Predictions:
        return data

    def set_loss_fn(self, loss_fn: LossFn) -> None:
        self._loss_fn = loss_fn

    def optimizer_zero_grad(self) -> None: ...

    def take_weights(self, other: Engine, keep: float = 0.0) -> None: ...

    def optimizer_step(self, lr: float | None = None, betas: tuple[float, float] | None = None) -> float:
        del lr, betas
        return 1.0

    lr_scheduler_step = optimizer_step

    def forward_backward_step(
        self,
        batch: TrainBatch,
        ctx: StepContext | None = None,
        *,
        forward_only: bool = False,
        predict: bool = True,
    ) -> tuple[object, ...]:
        del predict
        ctx = StepContext() if ctx is None else ctx
        check_batch(batch)
        mask_BT = batch["loss_mask"]
        predictions = Predictions(
            {name: -torch.rand(mask_BT.shape, generator=self._random) * mask_BT for name in self._names},
            batch_size=batch.batch_size,
        )
        if forward_only:
            return predictions, ctx
        scale = LossScale(
            num_tokens=int(mask_BT.sum()),
            num_sequences=len(mask_BT),
            num_units=len(set(units_of(batch) or range(len(mask_BT)))),
        )
        output, gradient = self._loss(predictions, batch, scale)
        self._check_additive(output.loss.item(), predictions, batch, scale)
        self.trained = True
        if "rollout_logprobs" in batch and not self.reads_sampler:
            other = batch.copy()
            other["rollout_logprobs"] = batch["rollout_logprobs"] + 0.5 * mask_BT
            self.reads_sampler = not torch.equal(gradient, self._loss(predictions, other, scale)[1])
        ctx.stats = StepStats(
            loss=output.loss.item(),
            sums={key: value.item() for key, value in output.sums.items()},
            maxes={key: value.item() for key, value in output.maxes.items()},
            num_tokens=scale.num_tokens,
            num_loss_tokens=scale.num_tokens,
            num_micro_batches=1,
        )
        return predictions, ctx.stats.loss, ctx

    def _loss(
        self, predictions: Predictions, batch: TrainBatch, scale: LossScale
    ) -> tuple[LossOutput, torch.Tensor]:
        """Return what the loss says of `batch` and its gradient by all predictions, one after the other."""
        assert self._loss_fn is not None
        with_entropy = bool(getattr(self._loss_fn, "entropy_gradient", False))
        leaves = {
            name: predictions[name].detach().requires_grad_(name != "entropy" or with_entropy)
            for name in self._names
        }
        answers = Predictions(dict(leaves), batch_size=batch.batch_size)  # pyright: ignore[reportArgumentType]
        output = self._loss_fn(answers, batch.copy(), scale)
        if not isinstance(output, LossOutput) or output.loss.ndim:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TrainerError(f"a loss returns a `LossOutput` whose `loss` is a scalar, got {output!r:.80}")
        if not output.loss.requires_grad:
            raise TrainerError("a loss has no gradient: it depends on none of " + ", ".join(self._names))
        trained = [leaf for leaf in leaves.values() if leaf.requires_grad]
        found = torch.autograd.grad(output.loss, trained, allow_unused=True, materialize_grads=True)
        return output, torch.cat([one.flatten() for one in found])

    def _check_additive(
        self, whole: float, predictions: Predictions, batch: TrainBatch, scale: LossScale
    ) -> None:
        """Raise `TrainerError` unless the losses of two parts, of a third of the units and the others, add up to that of the whole."""
        units = units_of(batch) or list(range(batch.batch_size[0]))
        first = set(list(dict.fromkeys(units))[: -(-len(set(units)) // 3)])
        cut = [[row for row, unit in enumerate(units) if (unit in first) is here] for here in (True, False)]
        losses: list[float] = []
        for rows in filter(None, cut):
            part = select_rows(batch, rows)
            longest = part["input_ids"].shape[1]
            some = {name: predictions[name][rows][:, :longest] for name in self._names}
            answers = Predictions(some, batch_size=[len(rows)])  # pyright: ignore[reportArgumentType]
            losses.append(self._loss(answers, part, scale)[0].loss.item())
        if not abs(whole - sum(losses)) <= _ROUNDING * max(1.0, abs(whole)):
            raise TrainerError(
                f"a loss is {whole:.6g} of a mini-batch, and {' + '.join(f'{one:.6g}' for one in losses)} of its two parts: how a batch is "
                "cut into micro-batches would change what is learned. Sum over tokens or sequences and divide by the counts in `scale`"
            )


def _group(number: int, size: int) -> Group:
    """Return completions of 1, 2, 3, 1, ... tokens, of which every second is right; in every second group the first one."""
    uid = f"group {number}"
    rights = [(number + index) % 2 for index in range(size)]
    return Group(
        prompt=Prompt(uid=uid, text="1+1=", token_ids=(1, 2)),
        trajectories=tuple(
            Trajectory.of(
                Completion.of(
                    request_id=f"{uid}/{index}",
                    token_ids=[3] * (1 + index % _TOKENS),
                    logprobs=[-1.0] * (1 + index % _TOKENS),
                    policy_versions=[1] * (1 + index % _TOKENS),
                    finish=Finish.STOP,
                )
            )
            for index in range(size)
        ),
        scores=tuple(Score(reward=right, correct=right == 1) for right in rights),
    )
