"""DAPO: GRPO with clip-higher, the mean over tokens, dynamic sampling, and two answers to completions that are too long."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch

from offbeat_engine import Field, register_field
from offbeat_rollout import Finish
from offbeat_trainer.algorithms.grpo import Grpo
from offbeat_trainer.config import AlgorithmConfig, DapoConfig
from offbeat_trainer.data.metrics import Mean, Metric, described

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat_engine import TrainBatch
    from offbeat_trainer.algorithms.roles import Role
    from offbeat_trainer.data.types import Group

PENALTY = register_field(
    Field(key="dapo/overlong_penalty", dims="B", meaning="what the reward lost for its length")
)
described(
    "dapo/overlong_penalty",
    meaning="mean of what completions lost for their length, 0 to 1, which reward/mean does not count",
)


def overlong_penalty(length: int, longest: int, buffer: float) -> float:
    """Return what a completion of `length` tokens loses, 0 to 1 (DAPO, arXiv 2503.14476, equation 13).

    0 up to longest - b, then (length - (longest - b)) / b, and 1 from `longest` on; b is the fraction `buffer` of `longest`.
    """
    tokens = buffer * longest
    return min(max((length - (longest - tokens)) / tokens, 0.0), 1.0) if tokens else 0.0


class Dapo(Grpo):
    """DAPO (arXiv 2503.14476): GRPO that replaces groups without a signal and does not learn from completions that were cut off.

    A = (r - mu) / (sigma + 1e-6) as `grpo`, with mu and sigma of the G rewards of a prompt, after r has lost overlong_penalty
    min(max((l - (L - b)) / b, 0), 1): l the tokens of the completion, L the most it may have, b the fraction overlong_buffer of L. The
    loss is the mean over all tokens of max(-rho A, -clip(rho, 1 - 0.2, 1 + 0.28) A) with rho = pi / pi_old. Groups whose G rewards, before
    that, are equal are left out and others made in their place; a completion that was cut off counts in mu and sigma and is not trained.

    Use it when completions are long reasoning, some are cut off, and many prompts are always or never solved. Do not use it when
    generation is the bottleneck, since groups that are left out were generated, too, or with a tight limit: most completions then lie in
    the buffer, and the penalty outweighs what they earn (`overlong_buffer=0`).
    """

    Config: ClassVar[type[AlgorithmConfig]] = DapoConfig
    config: DapoConfig

    def targets(self, groups: Sequence[Group]) -> Mapping[str, torch.Tensor]:
        """See `Algorithm.targets`."""
        longest, buffer = self.step.max_completion_tokens, self.config.overlong_buffer
        trajectories = [one for group in groups for one in group.trajectories]
        penalties = [overlong_penalty(one.num_tokens, longest, buffer) for one in trajectories]
        lost = iter(penalties)
        shaped = [
            replace(
                group,
                scores=tuple(
                    replace(score, reward=score.reward - less)
                    for score, less in zip(group.scores, lost, strict=False)
                ),
            )
            for group in groups
        ]
        whole = [one.finish is not Finish.LENGTH for one in trajectories]
        return {
            **super().targets(shaped),
            PENALTY.key: torch.tensor(penalties),
            "loss_mask": torch.tensor(whole),
        }

    def learn(self, roles: Mapping[str, Role], batch: TrainBatch) -> list[Metric]:
        """See `Algorithm.learn`."""
        penalty = Metric(PENALTY.key, Mean(float(batch[PENALTY.key].sum()), batch.batch_size[0]))
        return [*super().learn(roles, batch.exclude(PENALTY.key)), penalty]
