"""The seams of the trainer: what a loop needs and does not care how it is done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from offbeat_ckptsync import SyncReport
    from offbeat_engine import LossFn, LossScale, TrainBatch
    from offbeat_rollout import Completion, GenerateRequest, SamplingParams
    from offbeat_trainer.data.metrics import Metric
    from offbeat_trainer.data.types import Example, Group, Prompt, Trajectory


class Task(Protocol):
    """Where prompts come from. Pure functions of their arguments and a seed."""

    def prompts(self, step: int, num_prompts: int) -> list[Prompt]:
        """Return the training prompts of `step`; the same ones whenever asked again."""
        ...

    def validation_prompts(self, num_prompts: int) -> list[Prompt]:
        """Return up to `num_prompts` held-out prompts, always the same, never met in training."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, for people."""
        ...

    def stop_token_ids(self) -> tuple[int, ...]:
        """Return the tokens that end a completion."""
        ...


class Scorer(Protocol):
    """What completions are worth. Groups are scored side by side."""

    async def score(self, group: Group) -> Group:
        """Return `group` with one score per completion; one that is `UNSCORED` (a reward of nan) is left out of training.

        Raises:
            GroupFailed: it has none; the group is left out, and counted by the error's reason.
            TrainerError: it has none, and the run is to end.
        """
        ...

    async def close(self) -> None:
        """End what was started for it; safe to call twice."""
        ...


class Supervised(Protocol):
    """Where supervised pairs come from, for a warm-up."""

    def examples(self, step: int, num_examples: int) -> list[Example]:
        """Return the examples of `step`; the same ones whenever asked again."""
        ...


class Policy(Protocol):
    """The training side as a loop sees it."""

    async def update(self, batch: TrainBatch, state: Mapping[str, float] | None = None) -> list[Metric]:
        """Train on one step's batch (all its mini-batches) and return what happened; `state` is that of the algorithm."""
        ...

    async def supervise(self, batch: TrainBatch) -> list[Metric]:
        """Train on one supervised batch: token-mean negative log-likelihood."""
        ...

    async def save(self, step: int, *, block: bool) -> None:
        """Write a checkpoint of `step`, atomically.

        Without `block` it may return once what it saves can change no more, and go on in the background; the next save
        waits for it and raises what went wrong there.
        """
        ...

    async def load(self, step: int | None) -> int | None:
        """Load the checkpoint of `step`, or the newest whole one; return its step, or None if there is none."""
        ...

    async def export(self, path: str) -> None:
        """Write a Hugging Face folder."""
        ...


@runtime_checkable
class StepwisePolicy(Protocol):
    """A `Policy` whose gradients and optimizer steps can be had apart. While gradients wait for a step, nothing else may train or save."""

    async def accumulate(
        self, batch: TrainBatch, loss: LossFn, scale: LossScale | None = None
    ) -> list[Metric]:
        """Add the gradient of `loss` on `batch` to what waits for `take_step`; the weights stay. Return what the loss said.

        The loss divides by the counts of `scale`; None: those of this batch, so that several calls add up means.
        """
        ...

    async def take_step(
        self, lr: float | None = None, betas: tuple[float, float] | None = None
    ) -> list[Metric]:
        """Make one optimizer step by the gradients that wait. `lr` and `betas` are of this step alone; None: the settings'."""
        ...

    async def logprobs(self, batch: TrainBatch, role: str = "policy") -> Tensor:
        """Return what a role's model says of `batch`: log-probs [B, T] float32 on the CPU, zero outside `loss_mask`."""
        ...


class OfflinePolicy(Protocol):
    """The training side as a loop over written rows sees it; see `Policy` for what is alike."""

    async def update(self, batch: TrainBatch, state: Mapping[str, float] | None = None) -> list[Metric]:
        """Train on one step's batch."""
        ...

    async def evaluate(self, batch: TrainBatch) -> list[Metric]:
        """Return what the models say of held-out rows; see `OfflineAlgorithm.evaluate`."""
        ...

    async def save(self, step: int, *, block: bool) -> None:
        """Write a checkpoint of `step`, atomically."""
        ...


class Generator(Protocol):
    """The generation side as a loop sees it."""

    async def complete(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        group_size: int,
        begun: tuple[Trajectory, ...] = (),
        keep: Callable[[tuple[Trajectory, ...]], None] | None = None,
    ) -> Group:
        """Return one whole unscored group; many of these run side by side.

        `begun` is what the group has already (those with `Finish.ABORT` are continued from their tokens), and
        `keep` is given that at every interruption.
        """
        ...

    async def turn(self, request: GenerateRequest) -> Completion:
        """Return one whole completion of a request of one's own, however often `interrupt` came in between."""
        ...

    async def interrupt(self) -> None:
        """End what `complete` and `turn` have under way; it waits for `go_on` and continues from its tokens."""
        ...

    def go_on(self) -> None:
        """Let them go on after `interrupt`; harmless otherwise."""
        ...


class Rollout(Protocol):
    """From a prompt to a scored group. Many run side by side."""

    async def run(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        n: int,
        begun: tuple[Trajectory, ...] = (),
        keep: Callable[[tuple[Trajectory, ...]], None] | None = None,
    ) -> Group:
        """Return `n` trajectories of `prompt`, with one score each.

        What is drawn follows from `sampling.seed`, the prompt's uid and the place in the group alone. `begun` is what an
        interrupted group has already, and `keep` is given that at every interruption, by those that can go on from there; others
        begin anew.

        Raises:
            GroupFailed: it could not be made or scored; it is left out, and counted by the error's reason.
            RolloutError: replicas failed; it is tried again.
            TrainerError: the run is to end.
        """
        ...

    async def interrupt(self) -> None:
        """End what is being sampled; it waits for `go_on` and continues from its tokens."""
        ...

    def go_on(self) -> None:
        """Go on after `interrupt`; harmless otherwise."""
        ...

    async def close(self) -> None:
        """End what was started for it; safe to call twice."""
        ...


class Publisher(Protocol):
    """The way from training to generation."""

    async def publish(self, version: int, gathered: Callable[[], None] | None = None) -> SyncReport:
        """Bring every replica to the policy's current weights, as `version`; return when all serve them.

        `gathered` may be called once the weights are copied out: they may change from then on. Where a sync has failed after that,
        and another try brought newer weights, the report has their version: as many more as there were updates.
        """
        ...


class Reporter(Protocol):
    """Where a run tells what is going on. Every method returns at once and never raises for a slow sink."""

    def phase(self, name: str, detail: str = "") -> None:
        """The run entered a phase: "start", "warm-up", "generate", "train", ..."""
        ...

    def metrics(self, step: int, metrics: Sequence[Metric]) -> None:
        """Metrics of a finished step, reduced or not."""
        ...

    def samples(self, step: int, title: str, groups: Sequence[Group], texts: Sequence[Sequence[str]]) -> None:
        """Some completions to read, `texts[i][j]` that of `groups[i].trajectories[j]`."""
        ...

    def summary(self, values: Mapping[str, object]) -> None:
        """The run is over."""
        ...

    def close(self) -> None:
        """Flush and release; safe to call twice."""
        ...
