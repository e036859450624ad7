"""One rank's part in training, an algorithm and the models it works with; and a `Policy` that carries its calls to the ranks."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from offbeat_engine.batch import SftLoss
from offbeat_trainer.algorithms.interface import OfflineAlgorithm
from offbeat_trainer.algorithms.roles import POLICY
from offbeat_trainer.data.interface import OfflinePolicy, Policy, StepwisePolicy
from offbeat_trainer.errors import TrainerError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping
    from types import CoroutineType

    from torch import Tensor

    from offbeat_engine import Engine, LossFn, LossScale, TrainBatch
    from offbeat_trainer.algorithms.interface import Algorithm
    from offbeat_trainer.algorithms.roles import Role
    from offbeat_trainer.config import AlgorithmConfig
    from offbeat_trainer.data.metrics import Metric

P = ParamSpec("P")
T = TypeVar("T")


class Learner:
    """What a `Policy` does on each rank. Every method is a collective."""

    def __init__(
        self,
        algorithm: Algorithm[AlgorithmConfig],
        roles: Mapping[str, Role],
        *,
        checkpoints: str,
        keep: int,
    ) -> None:
        """Train `roles` by `algorithm`; each trained one has a folder of checkpoints in `checkpoints`."""
        self._algorithm = algorithm
        self._roles = roles
        roles[POLICY].replays = True
        trained = [name for name, spec in algorithm.roles().items() if spec.trained and name in roles]
        # The policy comes last: where its checkpoint of a step is whole, so are the others'.
        self._folders = {name: f"{checkpoints}/{name}" for name in sorted(trained, key=POLICY.__eq__)}
        self._keep = keep
        self._waits = False  # gradients wait for a step

    @property
    def policy(self) -> Engine:
        """The engine whose weights go to the replicas."""
        return self._roles[POLICY].engine

    def update(self, batch: TrainBatch, state: Mapping[str, float] | None = None) -> list[Metric]:
        """See `Policy.update`."""
        self._check_whole("train a whole step")
        algorithm = self._algorithm.at(state) if state else self._algorithm
        metrics = algorithm.learn(self._roles, batch)
        self._begin_at(self._roles[POLICY].step + 1)
        return metrics

    def supervise(self, batch: TrainBatch) -> list[Metric]:
        """See `Policy.supervise`."""
        self._check_whole("train a supervised batch")
        policy = self._roles[POLICY]
        return policy.train(policy.shares(batch), SftLoss())

    def accumulate(self, batch: TrainBatch, loss: LossFn, scale: LossScale | None = None) -> list[Metric]:
        """See `StepwisePolicy.accumulate`."""
        policy = self._roles[POLICY]
        [share] = policy.shares(batch)
        self._waits = False  # what fails drops what waited
        metrics = policy.accumulate(share, loss, scale)
        self._waits = True
        return metrics

    def take_step(self, lr: float | None = None, betas: tuple[float, float] | None = None) -> list[Metric]:
        """See `StepwisePolicy.take_step`."""
        if not self._waits:
            raise TrainerError("there is no gradient to step by: call `accumulate` first")
        policy = self._roles[POLICY]
        metrics = policy.take_step(lr, betas)
        self._waits = False
        self._begin_at(policy.step + 1)
        return metrics

    def logprobs(self, batch: TrainBatch, role: str = POLICY) -> Tensor:
        """See `StepwisePolicy.logprobs`."""
        if role not in self._roles:
            raise TrainerError(f"there is no role {role!r}; the algorithm has {', '.join(self._roles)}")
        return self._roles[role].whole_logprobs(batch)

    def _check_whole(self, what: str) -> None:
        if self._waits:
            raise TrainerError(
                f"gradients wait for a step, and would be lost: call `take_step` before you {what}"
            )

    def evaluate(self, batch: TrainBatch) -> list[Metric]:
        """See `OfflinePolicy.evaluate`."""
        assert isinstance(self._algorithm, OfflineAlgorithm), (
            "only what reads written rows looks at held-out ones"
        )
        return self._algorithm.evaluate(self._roles, batch)

    def save(self, step: int, *, block: bool) -> None:
        """See `Policy.save`. Of several roles all but the policy are waited for, and keep one checkpoint more."""
        self._check_whole("save")
        for name, folder in self._folders.items():
            is_policy = name == POLICY
            self._roles[name].engine.save_checkpoint(
                folder,
                global_step=step,
                max_ckpt_to_keep=self._keep if is_policy else self._keep + 1,
                block=block or not is_policy,
            )

    def load(self, step: int | None) -> int | None:
        """See `Policy.load`; every role goes back to the step that the policy does."""
        self._waits = False
        found = self.policy.load_checkpoint(self._folders[POLICY], global_step=step)
        if found is not None:
            for name, folder in self._folders.items():
                if name != POLICY:
                    self._roles[name].engine.load_checkpoint(folder, global_step=found)
            self._begin_at(found)
        return found

    def _begin_at(self, step: int) -> None:
        for role in self._roles.values():
            role.step = step

    def export(self, path: str) -> None:
        """See `Policy.export`."""
        self.policy.export_huggingface(path)

    def close(self) -> None:
        """Close the engines."""
        for engine in {id(role.engine): role.engine for role in self._roles.values()}.values():
            engine.close()


class Carrier(Protocol):
    """Who brings a call to where it is done."""

    async def carry(self, method: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the method has them
        """Have `method` done, and return its answer."""
        ...


def carried(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Carrier, P], CoroutineType[Any, Any, T]]:
    """Return `method`, that of a protocol, as the method of a class that carries it."""

    @wraps(method)
    async def call(self: Carrier, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.carry(method.__name__, *args, **kwargs)

    return call


class CarriedPolicy(ABC):
    """Satisfies `Policy`, `StepwisePolicy` and `OfflinePolicy` by learners elsewhere, each of which does what it is asked."""

    update = carried(Policy.update)
    supervise = carried(Policy.supervise)
    accumulate = carried(StepwisePolicy.accumulate)
    take_step = carried(StepwisePolicy.take_step)
    logprobs = carried(StepwisePolicy.logprobs)
    evaluate = carried(OfflinePolicy.evaluate)
    save = carried(Policy.save)
    load = carried(Policy.load)
    export = carried(Policy.export)

    @abstractmethod
    async def carry(self, method: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - see `Carrier`
        """Let every learner do `method`, and return what the first one answers."""


class LocalPolicy(CarriedPolicy):
    """With a learner in this process, whose calls run in one thread of their own."""

    def __init__(self, learner: Learner, *, timeout_s: float) -> None:
        """Train through `learner`; every call must end within `timeout_s`."""
        self._learner = learner
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="policy")

    async def carry(self, method: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - see `Carrier`
        """See `CarriedPolicy.carry`."""
        work = partial(getattr(self._learner, method), *args, **kwargs)
        async with asyncio.timeout(self._timeout_s):
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
