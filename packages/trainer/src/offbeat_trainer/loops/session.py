"""What every loop is given, and the verbs of a loop of one's own: sample, train, step, publish.

B = sequences, T = tokens of the longest one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from offbeat_engine import LossScale
from offbeat_trainer.algorithms.registry import loss_by_name
from offbeat_trainer.algorithms.roles import POLICY
from offbeat_trainer.config import AsyncConfig
from offbeat_trainer.data.assemble import assembled, group_metrics
from offbeat_trainer.data.interface import StepwisePolicy
from offbeat_trainer.data.metrics import Metric, reduce_metrics
from offbeat_trainer.errors import TrainerError
from offbeat_trainer.loops.events import MemoryJournal
from offbeat_trainer.loops.run_store import RunState
from offbeat_trainer.rollouts.single import WithBaseline, run_all, sampling_params
from offbeat_trainer.watch.watchdog import PhaseClock, Timeline, Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from torch import Tensor

    from offbeat_ckptsync import SyncReport
    from offbeat_engine import LossFn, TrainBatch
    from offbeat_rollout import SamplingParams
    from offbeat_trainer.algorithms.interface import Algorithm
    from offbeat_trainer.config import AlgorithmConfig, LoopConfig, SamplingConfig
    from offbeat_trainer.data.interface import Policy, Publisher, Reporter, Rollout, Task
    from offbeat_trainer.data.types import Group, Prompt
    from offbeat_trainer.loops.events import Journal
    from offbeat_trainer.loops.run_store import RunStore
    from offbeat_trainer.loops.schedule import Schedule

PLAIN_SUMS = LossScale(num_tokens=1, num_sequences=1, num_units=1)
"""Counts by which a loss that divides by them is a sum."""


class StopRequest:
    """Asked for from outside (Ctrl-C), honoured by a loop between two steps.

    `listening` says that a loop is at work and will come to look; before that there is nothing to finish. `held` says
    that the step at hand is none to end after: its weights have not flowed, and a run that goes on from it would begin
    by letting them flow, which one that is left alone does not.
    """

    def __init__(self) -> None:
        self.requested = False
        self.listening = False
        self.held = False

    @property
    def due(self) -> bool:
        """Whether the run ends after the step at hand."""
        return self.requested and not self.held


@dataclass(slots=True, kw_only=True)
class Session:
    """Everything a loop works with, and its verbs, for a loop of one's own.

    `asynchrony` says how far generation may run ahead of our loops; `replay` is a recorded schedule to be followed. `beside`, where the
    loop runs on, is `GroupStream.beside`. `steps` counts
    the optimizer steps that `step` made, those before a resume included, and `version` names the weights that `publish` brought last.

    ```python
    for _ in range(10):
        groups = await session.sample(task.prompts(session.steps, 16))
        await session.train(await session.batch(groups))
        await session.step()
        await session.publish()
    ```
    """

    task: Task
    policy: Policy
    rollout: Rollout
    publisher: Publisher
    reporter: Reporter
    store: RunStore
    seed: int
    loop: LoopConfig
    algorithm: Algorithm[AlgorithmConfig]
    sampling: SamplingConfig
    stop: StopRequest = field(default_factory=StopRequest)
    asynchrony: AsyncConfig = field(default_factory=AsyncConfig)
    journal: Journal = field(default_factory=MemoryJournal)
    replay: Schedule | None = None
    timeline: Timeline = field(default_factory=Timeline)
    watchdog: Watchdog = field(default_factory=Watchdog)
    beside: Callable[[Coroutine[Any, Any, list[Metric]]], None] | None = None
    steps: int = 0
    version: int = 0
    training_rollout: Rollout = field(init=False)  # `rollout`, with the baseline of the algorithm
    _held_out: list[Prompt] | None = None
    _num_samples: int = 0  # calls of `sample` since the last step
    _metrics: list[Metric] = field(default_factory=list[Metric])  # not reported yet

    def __post_init__(self) -> None:
        """Have a baseline beside each group that is to be trained, if the algorithm draws one."""
        changes = self.algorithm.baseline()
        self.training_rollout = WithBaseline(self.rollout, changes) if changes else self.rollout

    @property
    def held_out(self) -> list[Prompt]:
        """The prompts of every validation: the task is asked for them once, and may take its time."""
        if self._held_out is None:
            self._held_out = self.task.validation_prompts(self.loop.validation_prompts)
        return self._held_out

    def clock(self) -> PhaseClock:
        """Return a clock for the phases of one step."""
        return PhaseClock(self.reporter, self.timeline, self.watchdog)

    async def sample(self, prompts: Sequence[Prompt], n: int | None = None, **changes: Any) -> list[Group]:  # noqa: ANN401
        """Return scored groups of `prompts`, in order, without those that could not be made or scored.

        `n` is the number of trajectories of a prompt, by default `trainer.group_size`. `changes` go before the run's settings, by
        the names of `SamplingParams`. What is drawn follows from the run's seed, from `steps`, from how often this was called since
        the last step, and from the prompt's uid. With `top_k` or `top_p` the tokens that were kept come with the completions, and
        those are what they are trained by: see `offbeat_trainer.data.assemble.KEPT`.

        Raises:
            GroupFailed: not one group could be made and scored.
            TrainerError: `top_p` without `top_k`, which bounds how many tokens are kept.
        """
        places = (self.steps, self._num_samples) if self._num_samples else (self.steps,)
        params = sampling_params(self.sampling, self.task, self.seed, *places)
        self._num_samples += 1
        params, n = _telling(replace(params, **changes)), self.loop.group_size if n is None else n
        return await run_all(self.training_rollout, prompts, params, n)

    async def batch(
        self, groups: Sequence[Group], temperature: float | None = None, **targets: Tensor
    ) -> TrainBatch:
        """Return `groups` as one batch, with the algorithm's targets, or with `targets` in their place; see `Algorithm.targets`.

        `temperature` is that by which they were sampled, by default the run's.
        """
        self._metrics += group_metrics(groups)

        def targets_of(groups: Sequence[Group]) -> Mapping[str, Tensor]:
            return targets or self.algorithm.targets(groups)

        return await assembled(
            groups, targets_of, self.sampling.temperature if temperature is None else temperature
        )

    async def train(
        self, batch: TrainBatch, loss: LossFn | str = "", *, sums: bool = False
    ) -> dict[str, float]:
        """Add the gradient of `loss` on `batch` to those of earlier calls since the last step; the weights stay.

        Args:
            batch: sequences, the same as for any loss here; a policy loss takes `old_logprobs` from it where there are some, which
                several steps on one batch need.
            loss: a function (`offbeat_engine.LossFn`), "cross_entropy", the name of an algorithm, or "" for the run's own.
            sums: count no tokens: the loss is a sum over them instead of a mean over those of this batch.

        Returns:
            What the loss and the engine say, by the names of docs/metrics.md.
        """
        chosen = loss_by_name(loss, self.algorithm) if isinstance(loss, str) else loss
        metrics = await self._stepwise.accumulate(batch, chosen, PLAIN_SUMS if sums else None)
        self._metrics += metrics
        return reduce_metrics(metrics)

    async def step(
        self, lr: float | None = None, betas: tuple[float, float] | None = None
    ) -> dict[str, float]:
        """Make one optimizer step by the gradients of `train`, and report all that was measured since the last one.

        `lr` and `betas` are of this step alone; None: what the settings say.
        """
        metrics = [*self._metrics, *await self._stepwise.take_step(lr, betas)]
        self.steps += 1
        self._metrics, self._num_samples = [], 0
        self.reporter.metrics(self.steps, metrics)
        values = reduce_metrics(metrics)
        self.algorithm = self.algorithm.after(values)
        return values

    async def publish(self) -> SyncReport:
        """Bring every replica to the policy's weights, as the next version; return when all serve them."""
        report = await self.publisher.publish(self.version + 1)
        self.version = report.version
        return report

    async def logprobs(self, batch: TrainBatch, role: str = POLICY) -> Tensor:
        """Return what a model of the algorithm says of `batch`: log-probs [B, T] float32, zero outside `loss_mask`."""
        return await self._stepwise.logprobs(batch, role)

    async def save(self) -> None:
        """Write a checkpoint of `steps`, whole when this returns."""
        self.store.save(RunState(step=self.steps, algorithm_state=dict(self.algorithm.state)))
        await self.policy.save(self.steps, block=True)

    async def load(self, step: int | None = None) -> int | None:
        """Go back to the checkpoint of `step`, or to the newest; return its step, or None where there is none.

        The replicas have its weights with the next `publish`.
        """
        found = await self.policy.load(step)
        if found is not None:
            self.steps, self._num_samples, self._metrics = found, 0, []
            self.algorithm = self.algorithm.at(self.store.load(found).algorithm_state)
        return found

    @property
    def _stepwise(self) -> StepwisePolicy:
        if not isinstance(self.policy, StepwisePolicy):
            raise TrainerError(
                f"{type(self.policy).__name__} trains whole steps alone; a loop of your own needs a `StepwisePolicy`"
            )
        return self.policy


def _telling(params: SamplingParams) -> SamplingParams:
    """Return `params` so that completions tell the tokens that truncation kept, of which ties may be more than `top_k`."""
    if params.temperature == 0 or (params.top_k == -1 and params.top_p == 1):
        return params
    if params.top_k == -1:
        raise TrainerError(
            f"`top_p` {params.top_p:g} keeps as many tokens as it takes, and training needs to know them all; give a `top_k` as well"
        )
    return params if params.top_logprobs > params.top_k else replace(params, top_logprobs=2 * params.top_k)
