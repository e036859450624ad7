"""Roles: the models that an algorithm works with, on training engines; a critic is one with a value head. They know the `Engine` interface alone.

B = sequences, T = tokens of the longest one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal, cast

import torch

from offbeat_engine import (
    Feature,
    Field,
    LossOutput,
    StepContext,
    TrainBatch,
    engine_class,
    engine_config_class,
    register_field,
    train_batch,
    units_of,
)
from offbeat_engine.config import EngineConfig, LoraConfig
from offbeat_trainer.algorithms.policy_loss import inside, k3, peak
from offbeat_trainer.config import KlEstimator
from offbeat_trainer.data.assemble import KEPT
from offbeat_trainer.data.metrics import Last, Max, Mean, Metric, Sum, reduce_metrics
from offbeat_trainer.errors import PlanRefused, TrainerError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat_engine import (
        Engine,
        LossFn,
        LossScale,
        OptimizerConfig,
        Predictions,
        StepStats,
        TrainBatch,
    )
    from offbeat_trainer.config import PolicyLossConfig


REF_TOP = register_field(
    Field(key="reference/top", dims="BTK", meaning="log-probabilities of `top_ids`, of all tokens")
)
POLICY = "policy"
"""The role that generates: its weights go to the replicas."""


def whole_kl(config: PolicyLossConfig) -> bool:
    """Whether there is a KL term of whole distributions."""
    return config.kl_coef != 0 and config.kl_estimator is KlEstimator.FULL


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """One model that an algorithm works with.

    `head` is what its model predicts: "lm" log-probs, "value" values. An empty `path` means the model that the run starts
    from. `engine` names the training engine that holds it, "" that of the run. `lr` None is that of the run's optimizer, and `optimizer` None that optimizer. `offload` says whether its weights and moments wait in host memory while they are
    not used; None leaves that to the run. `names_tokens`: it is asked for log-probs of other tokens than a batch's (`Feature.TOP_TOKENS`).
    """

    trained: bool
    head: Literal["lm", "value"] = "lm"
    path: str = ""
    engine: str = ""
    lr: float | None = None
    optimizer: OptimizerConfig | None = None
    offload: bool | None = None
    names_tokens: bool = False


def role_engines(
    roles: Mapping[str, RoleSpec], policy: EngineConfig, *, infers_alone: bool, generates: bool = True
) -> dict[str, EngineConfig | None]:
    """Return what the engine of each role is told, in the order of `roles`, where the policy's is told `policy`.

    None: no model of its own, but the base under the policy's adapters, which is what the run starts from. `infers_alone`: the
    run's engine can hold a model that is never trained without what training needs. Another engine is told what engines have in
    common, and has its defaults for the rest. A policy of a run that `generates` nothing may have a value head.

    Raises:
        PlanRefused: there is no policy among them that can generate and be trained.
    """
    wanted = RoleSpec(trained=True)
    found = roles.get(POLICY)
    if found is not None and not generates:
        wanted = replace(wanted, head=found.head)
    if found is None or replace(found, lr=None, optimizer=None, offload=None, names_tokens=False) != wanted:
        raise PlanRefused(
            f"an algorithm needs a role {POLICY!r} that is trained, has the head 'lm' and no path or engine of its own; got "
            + (", ".join(roles) or "no roles" if found is None else f"{found}")
        )
    return {name: _engine_of(spec, policy, infers_alone) for name, spec in roles.items()}


def _engine_of(spec: RoleSpec, policy: EngineConfig, infers_alone: bool) -> EngineConfig | None:
    if not (spec.trained or spec.path) and spec.head == "lm" and policy.lora.rank:
        return None
    engine = _made_for(spec.engine, policy)
    if spec.engine:
        infers_alone = Feature.INFERENCE_ONLY in engine_class(spec.engine).capabilities().features
    if spec.path or spec.head != "lm":
        engine = replace(
            engine, model=replace(engine.model, path=spec.path or engine.model.path, head=spec.head)
        )
    if not spec.trained:
        engine = replace(engine, lora=LoraConfig(), inference_only=infers_alone)
    if spec.optimizer is not None:
        engine = replace(engine, optimizer=spec.optimizer)
    if spec.lr is not None:
        engine = replace(engine, optimizer=replace(engine.optimizer, lr=spec.lr))
    if spec.offload is not None:
        engine = replace(engine, offload_parameters=spec.offload, offload_optimizer=spec.offload)
    return engine


def _made_for(name: str, policy: EngineConfig) -> EngineConfig:
    """Return the settings `policy` as the engine called `name` has them ("" is the policy's)."""
    cls = engine_config_class(name) if name else type(policy)
    if cls is type(policy):
        return policy
    return cls(**{item.name: getattr(policy, item.name) for item in fields(EngineConfig)})


class Role:
    """One model of an algorithm on this rank. Methods are collectives, but `shares`."""

    def __init__(self, engine: Engine, *, base: bool = False) -> None:
        """Take an initialised engine; with `base` the one that trains adapters, for the model under them."""
        self.engine = engine
        self.step = 0  # steps of the run that are done, those before a resume included
        self.replays = False  # see `unrouted`; the policy's learner sets it
        self._mode = engine.base_mode if base else engine.eval_mode

    def shares(self, batch: TrainBatch, num_updates: int = 1) -> list[TrainBatch]:
        """Return this rank's shares of `num_updates` mini-batches of `batch`, which is the same on every rank.

        Raises:
            ValueError: the sequences cannot be cut into so many equal mini-batches.
        """
        return [self.engine.shard_data(mini) for mini in split_evenly(batch, num_updates)]

    def logprobs(self, share: TrainBatch) -> torch.Tensor | None:
        """Return log-probs [B, T] float32 of this rank's share, where that is, zero outside its `loss_mask`.

        None on a rank that holds no outputs of the model, where no loss is called either.
        """
        return self._logprobs_of([share])[0]

    def whole_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """Return log-probs [B, T] float32 of `batch`, which is the same on every rank, in its order, on the CPU, on every rank."""
        share = self.engine.shard_data(self._own(batch))
        with self._mode():
            answers, _ = self.engine.forward_backward_step(share, forward_only=True)
        answers = of_kept_tokens(answers, share)
        return self.engine.unshard_data(answers.select("logprobs", strict=False))["logprobs"]

    def judge(self, shares: list[TrainBatch], key: str) -> None:
        """Put the log-probs of each of `shares` into it as `key`; weights that wait in host memory come for all once."""
        for share, logprobs in zip(shares, self._logprobs_of(shares), strict=True):
            if logprobs is not None:
                share[key] = logprobs

    def judge_for_kl(self, shares: list[TrainBatch], config: PolicyLossConfig) -> None:
        """Put what the KL term of `PolicyLoss` needs of this reference into each of `shares`."""
        if whole_kl(config):
            self.judge_top(shares, REF_TOP.key, 1 << 31)  # more than any vocabulary has
        else:
            self.judge(shares, "ref_logprobs")

    def judge_top(self, shares: list[TrainBatch], key: str, top_k: int) -> None:
        """Put the `top_k` likeliest tokens of each place into each of `shares` as `top_ids`, and their log-probs as `key` [B, T, K].

        Raises:
            TrainerError: the engine does not name them, or truncated sampling kept some tokens alone.
        """
        with self._mode():
            for share in shares:
                answer = self._likeliest(share, top_k)
                if "top_ids" in answer:
                    share["top_ids"], share[key] = answer["top_ids"], answer["top_logprobs"]

    def whole_energies(self, batch: TrainBatch, top_k: int) -> torch.Tensor:
        """Return 1 - 2 p + sum p(v)^2 of each token [B, T], as `whole_logprobs`: |grad log p|^2 by logits; v are the `top_k` likeliest.

        Raises:
            TrainerError: as `judge_top`.
        """
        with self._mode():
            answer = self._likeliest(self.engine.shard_data(batch), top_k)
        if "top_logprobs" in answer:
            squares_BT = (2 * answer["top_logprobs"]).exp().sum(-1)
            answer["logprobs"] = 1 - 2 * answer["logprobs"].exp() + squares_BT  # they travel as log-probs do
        return self.engine.unshard_data(answer.select("logprobs", strict=False))["logprobs"]

    def _likeliest(self, share: TrainBatch, top_k: int) -> Predictions:
        if Feature.TOP_TOKENS not in self.engine.capabilities().features:
            raise TrainerError(
                f"{type(self.engine).__name__} does not name the likeliest tokens; take engine=fsdp2"
            )
        if KEPT.key in share:
            raise TrainerError(
                "likeliest tokens are of whole distributions, and truncated sampling cut these; sample without top_k and top_p"
            )
        ctx = StepContext(top_k=top_k)
        return self.engine.forward_backward_step(self._own(share), ctx, forward_only=True)[0]

    def train(self, shares: list[TrainBatch], loss_fn: LossFn) -> list[Metric]:
        """Make one optimizer step by `loss_fn` on each of this rank's `shares` of mini-batches.

        Where these have `rollout_logprobs`, `mismatch/*` compares them with the trainer's from before the step, whatever the loss:
        `old_logprobs`, else the current ones. On fresh tokens it is rounding; on old ones it is mostly their age.
        A loss may carry a function `derived`: it is given the sums of a step, whole over all ranks, and returns what
        follows from them, for the metrics.

        Returns:
            The metrics of the steps, equal on all ranks.
        """
        self.engine.set_loss_fn(_Compared(loss_fn))
        with self.engine.train_mode():  # once for all: weights may wait in host memory outside
            steps = [(*self._accumulate(share, loss_fn), *self._take_step()) for share in shares]
        return [metric for metrics in steps for metric in metrics]

    def take_weights(self, other: Role, keep: float = 0.0) -> None:
        """Let this role's weights be `keep` of what they are and 1 - `keep` of what those of `other` are; see `Engine.take_weights`.

        A reference that is set to the policy now and then, or follows it as a moving average. Its `RoleSpec` is `trained`: that is
        what keeps its weights in float32 and in checkpoints.
        """
        self.engine.take_weights(other.engine, keep)

    def accumulate(self, share: TrainBatch, loss_fn: LossFn, scale: LossScale | None = None) -> list[Metric]:
        """Add the gradient of `loss_fn` on this rank's `share` to those of earlier calls; the weights stay. See `train`.

        The loss divides by the counts of `scale`, by default those of this batch over all ranks.
        """
        self.engine.set_loss_fn(_Compared(loss_fn))
        with self.engine.train_mode():
            return self._accumulate(share, loss_fn, scale)

    def take_step(self, lr: float | None = None, betas: tuple[float, float] | None = None) -> list[Metric]:
        """Make one optimizer step by what was accumulated, and drop that. See `Engine.optimizer_step`."""
        with self.engine.train_mode():
            return self._take_step(lr, betas)

    def _accumulate(self, share: TrainBatch, loss_fn: LossFn, scale: LossScale | None = None) -> list[Metric]:
        ctx = StepContext(scale=scale)
        try:
            self.engine.forward_backward_step(self._own(share), ctx, predict=False)
        except Exception:
            self.engine.optimizer_zero_grad()  # of a loss that is not finite, too
            raise
        assert ctx.stats is not None
        derived = getattr(loss_fn, "derived", None)
        follows: dict[str, float] = derived(ctx.stats.sums) if derived else {}
        return [*stats_metrics(ctx.stats), *(Metric(key, Mean(value)) for key, value in follows.items())]

    def _take_step(self, lr: float | None = None, betas: tuple[float, float] | None = None) -> list[Metric]:
        try:
            grad_norm = self.engine.optimizer_step(lr, betas)
        finally:
            self.engine.optimizer_zero_grad()  # not first in the next step: gradients would travel with offloaded weights
        next_lr = self.engine.lr_scheduler_step()
        return [Metric("train/grad_norm", Mean(grad_norm)), Metric("train/lr", Last(next_lr))]

    def _logprobs_of(self, shares: list[TrainBatch]) -> list[torch.Tensor | None]:
        with self._mode():
            answers = [
                of_kept_tokens(
                    self.engine.forward_backward_step(self._own(share), forward_only=True)[0], share
                )
                for share in shares
            ]
        return [cast("torch.Tensor | None", answer.get("logprobs", None)) for answer in answers]

    def _own(self, batch: TrainBatch) -> TrainBatch:
        batch = batch if self.replays else unrouted(batch)
        if KEPT.key in batch:
            batch = batch.copy()
            batch["top_ids"] = batch[KEPT.key].clamp(min=0)
        return batch


@dataclass(frozen=True, slots=True)
class _Compared:
    """A loss, and beside it how far sampler and trainer are apart."""

    loss_fn: LossFn

    @property
    def entropy_gradient(self) -> bool:
        return bool(getattr(self.loss_fn, "entropy_gradient", False))

    def __call__(self, predictions: Predictions, batch: TrainBatch, scale: LossScale) -> LossOutput:
        predictions = of_kept_tokens(predictions, batch)
        output = self.loss_fn(predictions, batch, scale)
        if "rollout_logprobs" not in batch or "logprobs" not in predictions:
            return output
        mask_BT, sampler_BT = batch["loss_mask"], batch["rollout_logprobs"]
        trainer_BT = batch["old_logprobs"] if "old_logprobs" in batch else predictions["logprobs"].detach()
        log_ratio_BT = inside(trainer_BT - sampler_BT, mask_BT).float()
        diff_BT = log_ratio_BT.abs()
        num_tokens = max(scale.num_tokens, 1)
        return replace(
            output,
            sums={
                **output.sums,
                "mismatch/mean_abs_logprob_diff": diff_BT.sum() / num_tokens,
                "mismatch/kl_nats": k3(log_ratio_BT).sum() / num_tokens,  # KL(sampler || trainer)
            },
            maxes={**output.maxes, "mismatch/max_abs_logprob_diff": peak(diff_BT)},
        )


def of_kept_tokens(predictions: Predictions, batch: TrainBatch) -> Predictions:
    """Return `predictions` with log-probs of the distribution that truncated sampling drew from, where it did: see `KEPT`.

    log q(y) = log pi(y) - log sum of pi(v) over the tokens v that the sampler kept, whose gradient is that of log q with the kept
    tokens held fixed ("Keep Sampling Mask", DeepSeek-V3.2, arXiv 2512.02556, section 3.1). `entropy` stays that of pi.
    """
    if KEPT.key not in batch or "top_logprobs" not in predictions:
        return predictions
    logprobs_BT, top_BTK = predictions["logprobs"], predictions["top_logprobs"]
    kept_BTK = batch[KEPT.key]
    drawn_BTK = (kept_BTK == batch["input_ids"][..., None]) & batch["loss_mask"][..., None]
    # Not -inf, of which alone the gradient of a log-sum-exp would be NaN.
    log_mass_BT = top_BTK.masked_fill(kept_BTK < 0, -1e30).logsumexp(-1)
    # Of the drawn token, too, what the engine says of kept ones: tokens that were cut have no gradient then, not a difference of two.
    found_BT = inside(top_BTK, drawn_BTK).sum(-1) - log_mass_BT
    found = predictions.copy()
    found["logprobs"] = torch.where(drawn_BTK.any(-1), found_BT, logprobs_BT)
    return found


def unrouted(batch: TrainBatch) -> TrainBatch:
    """Return `batch` without the experts that the sampler's routers chose, which are replayed by the policy alone.

    It has the weights that sampled, or those of a few steps later. A critic, a reference and a teacher have others, and routers
    that choose for them.
    """
    return batch.exclude("routed_experts") if "routed_experts" in batch else batch


def stats_metrics(stats: StepStats) -> list[Metric]:
    """Return an engine's `StepStats` as metrics: what the loss summed becomes a mean over optimizer steps."""
    return [
        Metric("train/loss", Mean(stats.loss)),
        Metric("train/micro_batches", Mean(stats.num_micro_batches)),
        Metric("train/tokens", Mean(stats.num_tokens)),
        *(Metric(key, Mean(value)) for key, value in stats.sums.items()),
        *(Metric(key, Max(value)) for key, value in stats.maxes.items()),
        *(Metric(f"engine/{key}", Mean(value)) for key, value in stats.engine.items()),
        *_costs(stats),
    ]


def _costs(stats: StepStats) -> list[Metric]:
    """Return what a step took. Rates are weighted by time, so that they are those of all steps together."""
    if not stats.elapsed_s:
        return []
    elapsed_s = stats.elapsed_s
    rates = [] if stats.mfu is None else [Metric("time/mfu_fraction", Mean(stats.mfu * elapsed_s, elapsed_s))]
    return [
        Metric("time/engine_s", Sum(elapsed_s)),
        Metric("time/engine_tokens_per_s", Mean(stats.num_tokens, elapsed_s)),
        *rates,
        Metric("memory/train_peak_bytes", Max(stats.peak_memory_bytes)),
    ]


def split_evenly(batch: TrainBatch, num_parts: int) -> list[TrainBatch]:
    """Cut `batch` into `num_parts` runs of sequences, in order; of units, equally many whole ones that are neighbours.

    The runs are of equal length, or differ by one where sequences were left out because their reward failed.

    Raises:
        ValueError: there are fewer sequences than parts, or the number of units is not divisible, or units do not lie
            together and in equal numbers.
    """
    num_sequences = batch.batch_size[0]
    units = units_of(batch)
    num_whole = num_sequences if units is None else len(set(units))
    if num_whole < num_parts or (units is not None and num_whole % num_parts):
        raise ValueError(
            f"{num_whole} {'sequences' if units is None else 'units'} cannot be cut into {num_parts} equal mini-batches; "
            "choose `updates_per_step` so that it divides prompts_per_step * group_size, or the prompts_per_step of written rows"
        )
    bounds = [num_sequences * part // num_parts for part in range(num_parts + 1)]
    parts = [slice(*pair) for pair in itertools.pairwise(bounds)]
    if units is not None and sum(len(set(units[part])) for part in parts) != num_whole:
        raise ValueError(
            "units must lie together in a batch, each of as many sequences, to be cut into mini-batches"
        )
    return [batch[part] for part in parts]


_MOMENTS = ("value/error_square", "value/return_mean", "value/return_square")


class Critic:
    """A value function being trained: V(tokens so far) before each token of a completion."""

    def __init__(self, engine: Engine, loss_fn: LossFn, *, updates_per_step: int = 1) -> None:
        """Take an initialised engine whose model has a value head, trained by `loss_fn`, a `ValueLoss`."""
        self._engine = engine
        self._loss_fn = loss_fn
        self._updates_per_step = updates_per_step

    def values(self, batch: TrainBatch) -> torch.Tensor:
        """Return the values [B, T] float32 of `batch` (the same on every rank), in its order, zero outside `loss_mask`.

        `values[b, t]` is the value of the state in which token t is chosen, so it goes with the log-prob of t. A
        collective.
        """
        return predict_values(self._engine, batch)

    def update(self, batch: TrainBatch) -> list[Metric]:
        """Train on `batch`, the same on every rank, with `returns` and the old `values` in it. A collective.

        Returns:
            The step's metrics under `critic/` and `value/`, equal on all ranks.

        Raises:
            ValueError: the batch cannot be cut into `updates_per_step` mini-batches.
        """
        role = Role(self._engine)
        batch = batch.exclude(KEPT.key)  # a value is of no distribution
        metrics = role.train(role.shares(batch, self._updates_per_step), self._loss_fn)
        means = reduce_metrics([metric for metric in metrics if metric.key in _MOMENTS])
        return [
            *(
                Metric(metric.key.replace("train/", "critic/"), metric.reduction)
                for metric in metrics
                if metric.key not in _MOMENTS
            ),
            Metric("value/explained_variance", Mean(explained_variance(*(means[key] for key in _MOMENTS)))),
        ]


def explained_variance(error_square: float, return_mean: float, return_square: float) -> float:
    """Return 1 - E[(R - v)^2] / Var[R]: 1 is a perfect critic, 0 one that knows only the mean, NaN if R never varies."""
    variance = return_square - return_mean**2
    return 1 - error_square / variance if variance > 0 else float("nan")


def predict_values(engine: Engine, batch: TrainBatch) -> torch.Tensor:
    """Shard, run forward, and gather the values in the order and shape of `batch`."""
    share = engine.shard_data(unrouted(batch))
    with engine.eval_mode():
        predictions, _ = engine.forward_backward_step(share, forward_only=True)
    return engine.unshard_data(predictions.select("values"))["values"]


class RewardModel:
    """A frozen judge: one number for a whole sequence, read where its last token was read."""

    def __init__(self, engine: Engine) -> None:
        """Take an initialised engine whose model has a value head; its optimizer is never stepped."""
        self._engine = engine

    def scores(self, batch: TrainBatch) -> torch.Tensor:
        """Return the score [B] float32 of every sequence of `batch` (the same on every rank), in its order.

        A collective. The value head answers at t with what it read before t. So that it reads the last token too,
        it is asked for the place after it; what stands there is never looked at.
        """
        return predict_values(self._engine, after_the_last(batch)).sum(-1)


def after_the_last(batch: TrainBatch) -> TrainBatch:
    """Return `batch` with one place more in each sequence, which alone is asked for; other keys are left behind."""
    lengths_B = batch["lengths"]
    position_T = torch.arange(batch["input_ids"].shape[1] + 1)
    return train_batch(
        input_ids=torch.nn.functional.pad(batch["input_ids"], (0, 1)),
        lengths=lengths_B + 1,
        loss_mask=position_T[None] == lengths_B[:, None],
    )
