"""Ours beside the recorded numbers of TRL, verl and NeMo-RL, under the settings of `peers.toml`; tools/record_peers/ made the fixtures.

B = sequences, T = tokens, G = completions of a prompt.
"""

import json
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from offbeat_engine import LossScale
from offbeat_rollout import Completion, Finish
from offbeat_trainer import StepShape
from offbeat_trainer.algorithms.advantages import from_batch, token_advantages
from offbeat_trainer.algorithms.distill import TAUGHT, DistillLoss
from offbeat_trainer.algorithms.policy_loss import CHOSEN, PolicyLoss
from offbeat_trainer.algorithms.ppo import ValueLoss, gae, whitened
from offbeat_trainer.algorithms.registry import algorithm_class, algorithm_names, peer_entry, peer_recipes
from offbeat_trainer.algorithms.written.pairs import CHOSEN as PREFERRED
from offbeat_trainer.data.types import Group, Prompt, Score, Trajectory
from offbeat_trainer.errors import LoadError

G = 4
WITHIN = 1e-6
RECIPES = peer_recipes()
ENTRIES = [
    (recipe, name)
    for recipe, entries in RECIPES.items()
    for name, entry in entries.items()
    if isinstance(entry, dict)
]


@cache
def fixture(recipe):
    return json.loads((Path(__file__).parent / "fixtures" / f"{recipe}.json").read_text(encoding="utf-8"))


CASES = [
    (recipe, name, case)
    for recipe, name in ENTRIES
    for case in dict.fromkeys((name, *RECIPES[recipe][name].get("cases", {})))
    if case in fixture(recipe)["cases"] and case not in RECIPES[recipe][name].get("apart", {})
]
APART = [(recipe, name, case) for recipe, name in ENTRIES for case in RECIPES[recipe][name].get("apart", {})]


def settings_of(recipe, name, case):
    return peer_entry(recipe, name)["settings"] | RECIPES[recipe][name].get("cases", {}).get(case, {})


def groups(data, reads):
    """Scored groups, whose completions are as long as the rows of the mask."""
    lengths = data["mask"].sum(1).long().tolist()
    rewards = data["reward_parts"].tolist() if "reward_parts" in reads else data["rewards"][:, None].tolist()
    made = []
    for begin in range(0, len(rewards), G):
        each = [
            Completion.of(
                request_id="r", token_ids=[3] * length, logprobs=[-1.0] * length, policy_versions=[1] * length,
                finish=Finish.STOP,
            )
            for length in lengths[begin : begin + G]
        ]  # fmt: skip
        scores = tuple(
            Score(reward=sum(parts), parts={str(index): part for index, part in enumerate(parts)})
            for parts in rewards[begin : begin + G]
        )
        prompt = Prompt(uid=f"p{begin}", text="", token_ids=(1, 2))
        baseline = (Score(reward=data["greedy_rewards"][begin // G].item()),)
        trajectories = tuple(map(Trajectory.of, each))
        made.append(Group(prompt=prompt, trajectories=trajectories, scores=scores, baseline=baseline))
    return made


def ours(recipe, name, case, settings):
    """Return by key what the algorithm `name` with `settings` makes of the inputs of a case."""
    recorded = fixture(recipe)["cases"][case]
    data = {key: torch.tensor(value, dtype=torch.float64) for key, value in fixture(recipe)["inputs"].items()}
    reads = recorded["reads"]
    mask_BT = data[next((key for key in ("turn_mask", "even_mask") if key in reads), "mask")].bool()
    cls = algorithm_class(name)
    config = cls.Config(**{key: _typed(cls.Config, key, value) for key, value in settings.items()})
    algorithm = cls(config=config, step=StepShape(group_size=G, max_completion_tokens=mask_BT.shape[1]))
    # A run always has what the sampler said: where the other library reads nothing of it, ours must be told not to.
    keys = ["rollout_logprobs", *(key for key in ("old_logprobs", "ref_logprobs") if key in reads)]
    batch = TensorDict({"loss_mask": mask_BT, **{key: data[key] for key in keys}}, batch_size=len(mask_BT))
    if "teacher_logprobs" in reads:
        batch[TAUGHT.key] = data["teacher_logprobs"]
    found = {}
    if name == "ppo":
        found |= ppo_targets(config, data, batch)
    elif "rewards" in reads:
        targets = algorithm.targets(groups(data, reads))
        if "advantages" not in targets:  # of tokens, by the ranks
            samples, named = from_batch(TensorDict({**batch, **targets}, batch_size=len(mask_BT)))
            energies_BT = 1 - 2 * data["old_logprobs"].exp() + data["squared_probs"]
            targets = {"advantages": token_advantages(samples, named, energies_BT)}
        found["advantages"] = targets["advantages"]
        batch["advantages"] = targets["advantages"].reshape(len(mask_BT), -1).expand(mask_BT.shape)
        if "loss_mask" in targets:
            batch["loss_mask"] = mask_BT & targets["loss_mask"].reshape(len(mask_BT), -1)
        if algorithm.chooses:
            batch[CHOSEN.key] = algorithm.choose(batch, data["logprobs"])
    loss_fn = loss_of(algorithm, batch)
    loss, found["gradient"] = differentiated(loss_fn, "logprobs", data["logprobs"], batch)
    return found | {"loss": loss}


def _typed(config, key, value):
    """Return an enum's member for its name, as settings are read."""
    kind = next(item.type for item in fields(config) if item.name == key)
    return kind(value) if isinstance(value, str) else value


def loss_of(algorithm, batch):
    """Return the loss that the policy is trained by; the first half of the rows is chosen where pairs are learned from."""
    pairs = len(batch) // 2
    batch["unit"] = torch.arange(pairs).repeat(2)
    batch[PREFERRED.key] = torch.arange(2 * pairs) < pairs
    if hasattr(algorithm, "loss_fn"):
        return algorithm.loss_fn()
    cls = DistillLoss if TAUGHT.key in batch else PolicyLoss
    return cls(config=algorithm.config, max_completion_tokens=algorithm.step.max_completion_tokens)


def ppo_targets(config, data, batch):
    """Advantages, returns and the critic's loss, as `Ppo.learn` has them."""
    mask_BT = batch["loss_mask"]
    last_B = (mask_BT * torch.arange(1, mask_BT.shape[1] + 1)).argmax(1)
    rewards_BT = torch.zeros_like(data["values"])
    rewards_BT[torch.arange(len(last_B)), last_B] = data["rewards"]
    batch["values"] = data["values"]
    advantages_BT, batch["returns"] = gae(
        rewards_BT, data["values"], mask_BT, discount=config.discount, trace=config.trace
    )
    batch["advantages"] = whitened(advantages_BT, mask_BT) if config.whiten else advantages_BT
    critic = ValueLoss(clip=config.value_clip)
    loss, gradient = differentiated(critic, "values", data["new_values"], batch)
    return {
        "advantages": batch["advantages"],
        "returns": batch["returns"],
        "value_loss": loss,
        "value_gradient": gradient,
    }


def differentiated(loss_fn, key, values_BT, batch):
    leaf_BT = values_BT.clone().requires_grad_()
    mask_BT = batch["loss_mask"]
    scale = LossScale(num_tokens=int(mask_BT.sum()), num_sequences=len(mask_BT), num_units=len(mask_BT) // 2)
    loss = loss_fn(TensorDict({key: leaf_BT}, batch_size=len(mask_BT)), batch, scale).loss
    loss.backward()
    return loss.detach(), leaf_BT.grad


def distances(recipe, name, case, settings):
    """Return the largest difference of each recorded quantity from ours."""
    recorded, found = fixture(recipe)["cases"][case], ours(recipe, name, case, settings)
    only = RECIPES[recipe][name].get("only", recorded)
    keys = [
        key
        for key in ("advantages", "returns", "loss", "gradient", "value_loss", "value_gradient")
        if key in recorded and key in only and key in found
    ]
    away = {}
    for key in keys:
        theirs = torch.tensor(recorded[key], dtype=torch.float64)
        mine = found[key].double()
        if theirs.dim() > mine.dim():  # of each token, where ours is of the completion
            mask = torch.tensor(fixture(recipe)["inputs"]["mask"])
            mine = mine[:, None] * mask
        away[key] = float((mine - theirs).abs().max())
    return away


@pytest.mark.parametrize(("recipe", "name", "case"), CASES)
def test_ours_give_the_number_of_the_other_library(recipe, name, case):
    away = distances(recipe, name, case, settings_of(recipe, name, case))
    assert "gradient" in away
    assert max(away.values()) <= WITHIN, away


@pytest.mark.parametrize(("recipe", "name", "case"), CASES)
def test_each_setting_is_needed_for_it(recipe, name, case):
    config = algorithm_class(name).Config()
    settings, own = settings_of(recipe, name, case), RECIPES[recipe][name].get("cases", {}).get(case)
    for key, value in (settings if own is None else own).items():
        if key == "dynamic_sampling" or (own is not None and value == getattr(config, key)):
            continue  # chooses groups and leaves their numbers alone; takes back what the algorithm's entry says
        without = {other: told for other, told in settings.items() if other != key}
        try:
            away = max(distances(recipe, name, case, without).values())
        except ValueError:  # a loss that cannot be without it
            continue
        assert away > WITHIN, f"{key} changes nothing"


@pytest.mark.parametrize(("recipe", "name", "case"), APART)
def test_what_is_told_to_differ_differs_by_what_is_told(recipe, name, case):
    away = max(distances(recipe, name, case, settings_of(recipe, name, case)).values())
    assert away == pytest.approx(RECIPES[recipe][name]["apart"][case], rel=0.05)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recorded_case_is_compared(recipe):
    compared = {case for one, _, case in (*CASES, *APART) if one == recipe}
    assert compared == set(fixture(recipe)["cases"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_installed_algorithm_has_an_entry_or_a_reason(recipe):
    assert sorted(RECIPES[recipe]) == algorithm_names()


@pytest.mark.parametrize(("recipe", "name"), ENTRIES)
def test_a_run_can_be_made_with_what_a_recipe_sets(recipe, name):
    cls = algorithm_class(name)
    settings = peer_entry(recipe, name)["settings"]
    config = cls.Config(**{key: _typed(cls.Config, key, value) for key, value in settings.items()})
    refused = {refusal.setting for refusal in cls(config=config, step=StepShape(group_size=G)).check()}
    assert refused <= {"algorithm.teacher_path"}, "which a run gives"


def test_what_there_is_not_is_refused_with_what_there_is():
    with pytest.raises(LoadError, match=r"no recipe 'trl-2'; there are nemo-rl-.*, trl-1\.16, verl-0\.9"):
        peer_entry("trl-2", "grpo")
    with pytest.raises(
        LoadError, match=r"algorithm=ppo: TRL has had no PPO since July 2026; it has .*dpo, dr_grpo, "
    ):
        peer_entry("trl-1.16", "ppo")
    with pytest.raises(LoadError, match="nothing was recorded"):
        peer_entry("verl-0.9", "mine.py:Mine")
