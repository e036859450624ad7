"""One rank's part in training: an algorithm and the models it works with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat_engine.losses import SftLoss
from offbeat_trainer.algorithms.offline import OfflineAlgorithm
from offbeat_trainer.roles.role import POLICY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat_engine import Engine, TrainBatch
    from offbeat_trainer.algorithms.interface import Algorithm
    from offbeat_trainer.config import AlgorithmConfig
    from offbeat_trainer.metrics import Metric
    from offbeat_trainer.roles.role import Role


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
