"""What verl computes: estimators of advantages, the actor's loss with KL and correction, the critic's, distillation."""

# ruff: noqa: ANN401 modules and configs of verl

# What another library's code takes and gives has no types here.
# pyright: basic, reportAttributeAccessIssue=false, reportAssignmentType=false, reportArgumentType=false

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from common import LOSS, B, Case, G, T, Tensors, differentiated

if TYPE_CHECKING:
    from pathlib import Path

VERL_POLICY = {"clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "loss_agg_mode", "tau_pos", "tau_neg", "use_kl_loss", "kl_loss_coef", "kl_loss_type", "entropy_coeff"}  # fmt: skip
VERL_CASES: dict[str, tuple[str, Case, tuple[str, ...]]] = {
    "grpo": ("grpo", {}, LOSS),
    "grpo-kl_loss": ("grpo", {"use_kl_loss": True, "kl_loss_coef": 0.1}, (*LOSS, "ref_logprobs")),
    "grpo-kl_loss-k2": ("grpo", {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "mse"}, (*LOSS, "ref_logprobs")),
    "grpo-seq-mean-token-mean": ("grpo", {"loss_agg_mode": "seq-mean-token-mean"}, LOSS),
    "grpo-rollout_is": ("grpo", {"rollout_is": "token", "rollout_is_threshold": 1.3}, (*LOSS, "rollout_logprobs")),
    "grpo-rollout_is-sequence": ("grpo", {"rollout_is": "sequence", "rollout_is_threshold": 1.3}, (*LOSS, "rollout_logprobs")),
    "grpo-icepop": ("grpo", {"rollout_is": "token", "rollout_is_threshold": "0.7_1.3"}, (*LOSS, "rollout_logprobs")),
    "dr_grpo": ("grpo", {"norm_adv_by_std_in_grpo": False, "loss_agg_mode": "seq-mean-token-sum-norm"}, LOSS),
    "rloo": ("rloo", {}, LOSS),
    "ppo": ("gae", {}, ("turn_mask", *LOSS, "values", "new_values")),
    "grpo-passk": ("grpo_passk", {}, LOSS),
    "grpo-opo": ("opo", {}, LOSS),
    "grpo-otb": ("optimal_token_baseline", {}, ("even_mask", *LOSS, "squared_probs")),
    "dapo": ("grpo", {"clip_ratio_high": 0.28}, LOSS),
    "gpg": ("gpg", {"loss_mode": "gpg"}, ("rewards", "logprobs")),
    "reinforce_pp": ("reinforce_plus_plus", {}, LOSS),
    "reinforce_pp_baseline": ("reinforce_plus_plus_baseline", {}, LOSS),
    "remax": ("remax", {}, (*LOSS, "greedy_rewards")),
    "gdpo": ("gdpo", {}, (*LOSS, "reward_parts")),
    "cispo": ("grpo", {"loss_mode": "cispo", "clip_ratio_low": 10.0}, LOSS),
    "gspo": ("grpo", {"loss_mode": "gspo", "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, "loss_agg_mode": "seq-mean-token-mean"}, LOSS),
    "sapo": ("grpo", {"loss_mode": "sapo"}, LOSS),
    "gmpo": ("grpo", {"loss_mode": "geo_mean"}, LOSS),
    "dppo": ("grpo", {"loss_mode": "dppo_tv"}, LOSS),
    "dppo-kl": ("grpo", {"loss_mode": "dppo_kl"}, LOSS),
    "dro": ("grpo", {"loss_mode": "dro", "dro_beta": 0.1}, LOSS),
    "clip_cov-half": ("grpo", {"loss_mode": "clip_cov", "clip_cov_ratio": 0.5, "clip_cov_lb": 0.2}, ("rewards", "logprobs")),
    "kl_cov-fifth": ("grpo", {"loss_mode": "kl_cov", "kl_cov_ratio": 0.2}, LOSS),
    "distill": ("distill", {}, ("logprobs", "teacher_logprobs")),
}  # fmt: skip


def verl_advantages(core: Any, name: str, data: Tensors, told: Case, mask: torch.Tensor) -> Case:
    """Return what verl's estimator `name` makes of the rewards, which stand at the last token of each row."""
    last = (mask * torch.arange(1, T + 1)).argmax(1)
    rewards = torch.zeros(B, T)
    rewards[torch.arange(B), last] = data["rewards"]
    more: Case = {"token_level_rewards": rewards, "response_mask": mask}
    index = import_module("numpy").repeat(range(B // G), G)
    extra = {
        "gae": {"values": data["values"], "gamma": 1.0, "lam": 1.0},
        "reinforce_plus_plus": {"config": SimpleNamespace(gamma=1.0)},
        "grpo_passk": {"index": index, "config": {"norm_adv_by_std_in_grpo": True}},
        "gdpo": {"index": index, **verl_parts(data, mask)},
        "optimal_token_baseline": {
            "index": index,
            "old_log_probs": data["old_logprobs"],
            "sum_pi_squared": data["squared_probs"],
        },
        "remax": {"reward_baselines": data["greedy_rewards"].repeat_interleave(G)},
    }
    more |= extra.get(name, {"index": index})
    if "norm_adv_by_std_in_grpo" in told:
        more["norm_adv_by_std_in_grpo"] = told["norm_adv_by_std_in_grpo"]
    advantages, returns = core.get_adv_estimator_fn(name)(**more)
    return {"advantages": advantages * mask, "returns": returns * mask}


def verl_parts(data: Tensors, mask: torch.Tensor) -> Case:
    """Return what GDPO's estimator finds the parts of a reward by: prompts have one token."""
    names = [f"part_{index}" for index in range(data["reward_parts"].shape[1])]
    parts = dict(zip(names, data["reward_parts"].T.numpy(), strict=True))
    one = torch.ones(B, 1)
    batch = {"prompts": one, "attention_mask": torch.cat([one, mask], 1).long()}
    return {"config": {"gdpo_reward_keys": names}, "non_tensor_batch": parts, "batch": batch}


def verl_actor(told: Case) -> Any:
    """Return the settings of verl's actor with what is `told`."""
    module = import_module("verl.workers.config")
    policy = {key: value for key, value in told.items() if key in VERL_POLICY}
    losses = {key: told[key] for key in ("loss_mode", "dro_beta", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef") if key in told}  # fmt: skip
    return module.ActorConfig(
        strategy="fsdp",
        rollout_n=G,
        use_dynamic_bsz=True,
        policy_loss=module.PolicyLossConfig(**losses),
        **policy,
    )


def verl_loss(
    data: Tensors, told: Case, advantages: torch.Tensor, mask: torch.Tensor, old: torch.Tensor
) -> Case:
    """Return the loss of verl's actor, with KL and correction, and its gradient."""
    losses, helper = (
        import_module("verl.workers.utils.losses"),
        import_module("verl.trainer.ppo.rollout_corr_helper"),
    )
    losses.no_padding_2_padding = lambda value, _: value  # ours are padded
    batch = {"response_mask": mask, "old_log_probs": old, "advantages": advantages, "ref_log_prob": data["ref_logprobs"]}  # fmt: skip
    if "rollout_is" in told:
        log_ratio = old - data["rollout_logprobs"]
        weights, _ = helper.compute_rollout_correction_weights(
            log_ratio, mask, told["rollout_is"], told["rollout_is_threshold"]
        )
        batch["rollout_is_weights"] = weights
    counts = {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None}
    whole = import_module("tensordict").TensorDict(batch, batch_size=[B])
    for key, value in counts.items():
        whole.set_non_tensor(key, value)
    actor = verl_actor(told)
    return differentiated(data, lambda leaf: losses.ppo_loss(actor, {"log_probs": leaf}, whole)[0])


def verl_critic(core: Any, data: Tensors, returns: torch.Tensor, mask: torch.Tensor) -> Case:
    """Return verl's value loss and its gradient with respect to the values."""

    def loss(leaf: torch.Tensor) -> torch.Tensor:
        return core.compute_value_loss(leaf, returns, data["values"], mask, cliprange_value=0.5)[0]

    found = differentiated(data, loss, key="new_values")
    return {"value_loss": found["loss"], "value_gradient": found["gradient"]}


def verl_distill(data: Tensors) -> Case:
    """Return verl's distillation by policy gradient: k1 of each token as its negative advantage."""
    losses, config = import_module("verl.trainer.distillation.losses"), import_module("verl.workers.config")
    losses.no_padding_2_padding = lambda value, _: value
    chosen = config.DistillationLossConfig(loss_mode="k1", use_task_rewards=False, use_policy_gradient=True)
    told = SimpleNamespace(distillation_loss=chosen)
    counts = {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None}
    batch = {"response_mask": data["mask"], "teacher_logprobs": data["teacher_logprobs"][..., None], "old_log_probs": data["logprobs"], **counts}  # fmt: skip
    actor = verl_actor({})
    return differentiated(
        data, lambda leaf: losses.distillation_loss(actor, told, {"log_probs": leaf}, batch)[0]
    )


def cases(data: Tensors, _: Path) -> tuple[Case, dict[str, Case]]:
    """Return who computed, and every case."""
    core = import_module("verl.trainer.ppo.core_algos")
    found: dict[str, Case] = {}
    for name, (estimator, told, reads) in VERL_CASES.items():
        case = found[name] = {"theirs": told, "reads": reads}
        if estimator == "distill":
            case |= verl_distill(data)
            continue
        mask = data[next((key for key in ("turn_mask", "even_mask") if key in reads), "mask")]
        old = data["old_logprobs" if "old_logprobs" in reads else "logprobs"]
        scored = verl_advantages(core, estimator, data, told, mask)
        case |= {"advantages": scored["advantages"], **verl_loss(data, told, scored["advantages"], mask, old)}
        if estimator == "gae":
            case |= {"returns": scored["returns"], **verl_critic(core, data, scored["returns"], mask)}
    return {name: version(name) for name in ("verl", "torch")}, found
