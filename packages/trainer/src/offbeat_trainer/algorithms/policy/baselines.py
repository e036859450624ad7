"""Algorithms with the loss of GRPO whose advantages are not of a group alone: REINFORCE++, ReMax, GPG and GDPO."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from offbeat_engine import Refusal
from offbeat_trainer.algorithms.advantages import by_group, dr_grpo, gpg, grpo, samples_of, whiten
from offbeat_trainer.algorithms.grpo import Grpo
from offbeat_trainer.algorithms.policy.configs import GdpoConfig, OwnAdvantageConfig
from offbeat_trainer.algorithms.policy_loss import Surrogate
from offbeat_trainer.config import AlgorithmConfig, KlIn
from offbeat_trainer.errors import TrainerError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat_trainer.algorithms.advantages import Samples
    from offbeat_trainer.algorithms.policy_loss import Tokens
    from offbeat_trainer.data.types import Group


class OwnEstimate(Grpo):
    """GRPO with an `estimate` of its own, of whole trajectories; `smallest_group` completions of a prompt are enough."""

    Config: ClassVar[type[AlgorithmConfig]] = OwnAdvantageConfig
    smallest_group: ClassVar[int] = 2

    def check(self) -> list[Refusal]:
        """See `Algorithm.check`."""
        found = super().check()
        if self.step.group_size < self.smallest_group:
            return found
        return [refusal for refusal in found if refusal.setting != "trainer.group_size"]


class ReinforcePlusPlus(OwnEstimate):
    """REINFORCE++ (arXiv 2501.03262): rewards are compared over the whole step, not within a prompt, and no critic is learned.

    A = (r - m) / sqrt(v + 1e-8), with r the reward of a completion (discount 1, so that each of its tokens has it) and m and v the mean
    and the variance of r over all tokens of the step; the loss is that of `grpo` with rho = pi / pi_old. The paper's KL in the reward
    is `kl_in: reward`, where the KL of the whole completion counts for each token, not that from the token on.

    Use it when one completion of a prompt must do (`trainer.group_size=1`) and rewards of prompts are comparable. Do not use it when
    prompts differ much in difficulty: what is easy is always rewarded (`reinforce_pp_baseline` takes the prompt's mean away).
    """

    smallest_group = 1

    def estimate(self, samples: Samples) -> torch.Tensor:
        """See `Grpo.estimate`."""
        return whiten(samples.rewards, samples.lengths)


class ReinforcePlusPlusBaseline(OwnEstimate):
    """REINFORCE++-baseline (arXiv 2501.03262): rewards less their prompt's mean, scaled by the deviation of the whole step.

    A = (a - m) / sqrt(v + 1e-8) with a = r - mu, r the reward of a completion, mu the mean of the G rewards of its prompt, and m and v
    the mean and the variance of a over all tokens of the step; the loss is that of `grpo` with rho = pi / pi_old.

    Use it when groups are small or nearly equal, so that a deviation of a group is noise. Do not use it with one completion of a
    prompt: a is 0 then.
    """

    def estimate(self, samples: Samples) -> torch.Tensor:
        """See `Grpo.estimate`."""
        return whiten(by_group(samples, dr_grpo), samples.lengths)


class ReMax(OwnEstimate):
    """ReMax (arXiv 2310.10505): a completion is worth what it earned above the greedy completion of the same prompt.

    A = r - r_greedy, with r the reward of a completion and r_greedy that of one more, drawn at temperature 0, scored and not trained;
    the loss is that of `grpo` with rho = pi / pi_old.

    Use it when one completion of a prompt must do (`trainer.group_size=1`): the greedy one costs as much as a second. Do not use it
    when groups of four or more are generated anyway: their mean is the cheaper baseline.
    """

    smallest_group = 1

    def baseline(self) -> Mapping[str, Any]:
        """See `Algorithm.baseline`."""
        return {"temperature": 0.0}

    def estimate(self, samples: Samples) -> torch.Tensor:
        """See `Grpo.estimate`."""
        return samples.rewards - samples.baselines


class Gpg(OwnEstimate):
    """GPG (arXiv 2504.02546): the plain policy gradient of centred rewards, without a ratio and without a clip.

    A = alpha (r - mu), with r the reward of a completion, mu the mean of the G rewards of its prompt and alpha = completions of the step
    / completions of groups whose rewards differ. The loss of a token is -A log pi; where other weights sampled it, times the weight
    of the correction.

    Use it when every step is one update of fresh completions (`trainer.updates_per_step=1`). Do not use it when a batch is trained in
    several updates or is old: nothing bounds how far they go.
    """

    def estimate(self, samples: Samples) -> torch.Tensor:
        """See `Grpo.estimate`."""
        return gpg(samples)

    def surrogate(self, ratio: torch.Tensor, advantages: torch.Tensor, tokens: Tokens) -> Surrogate:
        """See `Grpo.surrogate`."""
        del ratio
        return Surrogate(loss=-advantages * tokens.logprobs)


class Gdpo(OwnEstimate):
    """GDPO (arXiv 2601.05242): several rewards are normalised each by itself in the group before they are added.

    A = (a - m) / sqrt(v + 1e-8) with a = sum over k of w_k (r_k - mu_k) / (sigma_k + 1e-6): r_k is part k of a completion's reward
    (`Score.parts`), mu_k and sigma_k mean and deviation of the G parts k of its prompt, w_k its `part_weights`, and m and v mean and
    variance of a over the completions of the step. The loss is that of `grpo` with rho = pi / pi_old.

    Use it when a reward is a sum of parts of different size or difficulty, of which one hides the others. Do not use it with a single
    reward: it is GRPO then, but for the last scaling.
    """

    Config: ClassVar[type[AlgorithmConfig]] = GdpoConfig
    config: GdpoConfig

    def targets(self, groups: Sequence[Group]) -> Mapping[str, torch.Tensor]:
        """See `Algorithm.targets`; a reward without parts is its only one.

        Raises:
            TrainerError: completions have different parts, or a weight is of none of them.
        """
        samples = samples_of(groups)
        scores = [score for group in groups for score in group.scores]
        parts_B = [score.parts or {"reward": score.reward} for score in scores]
        names = sorted({name for parts in parts_B for name in parts})
        for parts in parts_B:
            if len(parts) != len(names):
                raise TrainerError(
                    f"every completion must have the same reward parts, got {sorted(parts)} beside {names}"
                )
        unknown = sorted(set(self.config.part_weights) - set(names))
        if unknown and any(score.parts for score in scores):
            raise TrainerError(
                f"`part_weights` names {unknown}; the rewards are {names}: name one of them, or leave it out"
            )
        total_B = torch.zeros_like(samples.rewards)
        for name in names:
            part_B = torch.tensor([parts[name] for parts in parts_B], dtype=torch.float64)
            normalised = partial(grpo, epsilon=self.config.std_epsilon)
            total_B += self.config.part_weights.get(name, 1.0) * by_group(
                replace(samples, rewards=part_B), normalised
            )
        return {"advantages": whiten(total_B, torch.ones_like(total_B))}

    def check(self) -> list[Refusal]:
        """See `Algorithm.check`."""
        if self.config.kl_in is KlIn.LOSS:
            return super().check()
        reason = "GDPO normalises the parts of a reward, of which the KL is none"
        return [*super().check(), Refusal("algorithm.kl_in", reason, "algorithm.kl_in=loss")]
