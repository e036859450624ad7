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
from offbeat_trainer.interface import OfflinePolicy, Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping
    from types import CoroutineType

    from offbeat_engine import Engine, TrainBatch
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

    @property
    def policy(self) -> Engine:
        """The engine whose weights go to the replicas."""
        return self._roles[POLICY].engine

    def update(self, batch: TrainBatch) -> list[Metric]:
        """See `Policy.update`."""
        metrics = self._algorithm.learn(self._roles, batch)
        self._begin_at(self._roles[POLICY].step + 1)
        return metrics

    def supervise(self, batch: TrainBatch) -> list[Metric]:
        """See `Policy.supervise`."""
        policy = self._roles[POLICY]
        return policy.train(policy.shares(batch), SftLoss())

    def evaluate(self, batch: TrainBatch) -> list[Metric]:
        """See `OfflinePolicy.evaluate`."""
        assert isinstance(self._algorithm, OfflineAlgorithm), (
            "only what reads written rows looks at held-out ones"
        )
        return self._algorithm.evaluate(self._roles, batch)

    def save(self, step: int, *, block: bool) -> None:
        """See `Policy.save`. Of several roles all but the policy are waited for, and keep one checkpoint more."""
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
    """Satisfies `Policy` and `OfflinePolicy` by learners elsewhere, each of which does what it is asked."""

    update = carried(Policy.update)
    supervise = carried(Policy.supervise)
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
