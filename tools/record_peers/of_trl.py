"""What TRL computes. Its methods are of trainers: they are called on an object that has the attributes they read and nothing else."""

# ruff: noqa: ANN401, SLF001 classes of TRL, and their own members

# What another library's code takes and gives has no types here.
# pyright: basic, reportAttributeAccessIssue=false, reportAssignmentType=false, reportArgumentType=false

from __future__ import annotations

from collections import defaultdict
from importlib import import_module
from importlib.metadata import version
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from common import LENGTHS, LOSS, B, Case, G, T, Tensors, differentiated

if TYPE_CHECKING:
    from pathlib import Path


def stage_of(data: Tensors, told: Case) -> SimpleNamespace:
    """Return what the methods of TRL's trainers read of `self`, by their defaults and what is `told`."""
    args = {
        "per_device_train_batch_size": B, "steps_per_generation": 1, "gradient_accumulation_steps": 1, "gradient_checkpointing_kwargs": None,
        "delta": None, "use_bias_correction_kl": False, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0,
    }  # fmt: skip
    held = {
        "loss_type": "dapo", "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, "scale_rewards": "group",
        "importance_sampling_level": "token", "multi_objective_aggregation": "sum_then_normalize", "num_iterations": 2,
        "use_vllm": True, "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_min": None, "vllm_importance_sampling_clip_max": 3.0, "off_policy_mask_threshold": None,
        "top_entropy_quantile": 1.0, "mask_truncated_completions": False, "pad_to_multiple_of": None, "reward_clip_range": None,
        "normalize_advantages": False, "num_generations": G, "current_gradient_accumulation_steps": 1,
        "max_completion_length": T, "environment_factories": None, "environments": None, "tools": None, "_is_vlm": False,
        "aux_loss_enabled": False, "_entropy_bonus_enabled": False, "_pending_extra_logs": {}, "_pending_metrics": {},
    }  # fmt: skip
    args |= {key: value for key, value in told.items() if key in args}
    held |= {key: value for key, value in told.items() if key in held}
    assert told.keys() <= {*args, *held, "reward_parts"}, told
    rewards = data["reward_parts"] if told.get("reward_parts") else data["rewards"][:, None]
    names = [f"reward_{index}" for index in range(rewards.shape[1])]
    reads = {"model": "old_logprobs", "reference": "ref_logprobs"}
    everywhere = {"gather": lambda value: value, "reduce": lambda value, reduction: value}
    stage = SimpleNamespace(
        **held,
        args=SimpleNamespace(**args),
        accelerator=SimpleNamespace(
            device=torch.device("cpu"), process_index=0, num_processes=1, **everywhere
        ),
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False, name="model"),
        ref_model=SimpleNamespace(name="reference"),
        reward_weights=torch.ones(len(names)),
        reward_funcs=names,
        reward_func_names=names,
        _tokenizer=SimpleNamespace(pad_token_id=0),
        _metrics={"train": defaultdict(list)},
        _logs=defaultdict(list, rewards=defaultdict(list)),
        _calculate_rewards=lambda *_: rewards.clone(),
    )
    stage._get_per_token_logps_and_entropies = lambda model, *_, **__: (
        data[reads[model.name]],
        data["entropy"],
        None,
    )
    return stage


def trl_policy(trainer: Any, data: Tensors, told: Case) -> Case:
    """Return advantages, loss and gradient as a trainer that samples computes them."""
    stage = stage_of(data, told)
    for name in ("get_off_policy_mask", "get_gamma_weights", "get_high_entropy_mask"):
        setattr(stage, name, getattr(trainer, name, None))
    ids = [[5] * length for length in LENGTHS]
    sampled = [row[:length].tolist() for row, length in zip(data["rollout_logprobs"], LENGTHS, strict=True)]
    whole = ([[3]] * B, ids, None, [""] * B, sampled, {}, None, None)
    stage._generate = lambda _: whole if trainer.__name__ == "GRPOTrainer" else (whole[0], ids, whole[3])
    prompts = [{"prompt": ""} for _ in range(B)]
    batch = trainer._generate_and_score_completions(stage, prompts)
    if told.get("num_iterations") == 1:  # one update of a batch: the old policy is the current one
        batch |= {
            "old_per_token_logps": data["logprobs"],
            "old_logps": (data["logprobs"] * data["mask"]).sum(1),
        }

    def loss(leaf: torch.Tensor) -> torch.Tensor:
        stage._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, data["entropy"], None)
        return trainer._compute_loss(stage, stage.model, batch)

    return {"advantages": batch["advantages"], **differentiated(data, loss)}


def trl_pairs(trainer: Any, data: Tensors, told: Case) -> Case:
    """Return loss and gradient of TRL's DPO; the first half of the rows is chosen, the second rejected."""
    held = {"loss_types": ["sigmoid"], "loss_weights": [1.0], "beta": 0.1, "label_smoothing": 0.0, "f_divergence_type": "reverse_kl", "ld_alpha": None}  # fmt: skip
    stage = SimpleNamespace(
        **held | told,
        accelerator=SimpleNamespace(device=torch.device("cpu"), gather=lambda value: value, gather_for_metrics=lambda value: value),
        model=torch.nn.Module(),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        precompute_ref_logps=False, aux_loss_enabled=False, use_weighting=False,
        _metrics={"train": defaultdict(list)}, _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    stage.model.is_gradient_checkpointing = False
    prompt = torch.zeros(B, 1, dtype=torch.int64)
    mask = torch.cat([prompt, data["mask"].long()], 1)
    batch = {
        "input_ids": torch.full_like(mask, 5),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
    }

    def answers(logprobs: torch.Tensor) -> Any:
        zeros = torch.zeros(B, T)
        return lambda **_: SimpleNamespace(
            log_probs=logprobs * data["mask"], entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
        )

    stage.ref_model = answers(data["ref_logprobs"])
    return differentiated(data, lambda leaf: trainer._compute_loss(stage, answers(leaf), batch, False))


TRL_CASES: dict[str, tuple[str, Case, tuple[str, ...]]] = {
    "grpo": ("grpo", {}, (*LOSS, "rollout_logprobs")),
    "grpo-loss_type-grpo": ("grpo", {"loss_type": "grpo", "use_vllm": False}, LOSS),
    "grpo-beta": ("grpo", {"beta": 0.04}, (*LOSS, "rollout_logprobs", "ref_logprobs")),
    "grpo-beta-bias-corrected": ("grpo", {"beta": 0.04, "use_bias_correction_kl": True, "use_vllm": False}, (*LOSS, "ref_logprobs")),
    "grpo-delta": ("grpo", {"delta": 3.0}, (*LOSS, "rollout_logprobs")),
    "grpo-token_truncate": ("grpo", {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.3}, (*LOSS, "rollout_logprobs")),
    "grpo-token_mask": ("grpo", {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.7, "vllm_importance_sampling_clip_max": 1.3}, (*LOSS, "rollout_logprobs")),
    "dr_grpo": ("grpo", {"loss_type": "dr_grpo", "scale_rewards": "none"}, (*LOSS, "rollout_logprobs")),
    "rloo": ("rloo", {"num_iterations": 1}, ("rewards", "logprobs")),
    "grpo-scale_rewards-batch": ("grpo", {"scale_rewards": "batch"}, (*LOSS, "rollout_logprobs")),
    "gspo-dapo": ("grpo", {"importance_sampling_level": "sequence", "use_vllm": False}, LOSS),
    "dapo": ("grpo", {"epsilon_high": 0.28}, (*LOSS, "rollout_logprobs")),
    "cispo": ("grpo", {"loss_type": "cispo", "epsilon_high": 5.0}, (*LOSS, "rollout_logprobs")),
    "cispo-epsilon_high": ("grpo", {"loss_type": "cispo", "epsilon_high": 2.0}, (*LOSS, "rollout_logprobs")),
    "gspo": ("grpo", {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}, (*LOSS, "rollout_logprobs")),
    "luspo": ("grpo", {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon_low": 2e-3, "epsilon_high": 2.5e-3}, (*LOSS, "rollout_logprobs")),
    "sapo": ("grpo", {"loss_type": "sapo"}, (*LOSS, "rollout_logprobs")),
    "vespo": ("grpo", {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1e9}, (*LOSS, "rollout_logprobs")),
    "opsm": ("grpo", {"off_policy_mask_threshold": 0.05, "use_vllm": False}, ("rewards", "logprobs", "rollout_logprobs")),
    "gdpo": ("grpo", {"multi_objective_aggregation": "normalize_then_sum", "reward_parts": True}, (*LOSS, "rollout_logprobs", "reward_parts")),
    "dpo": ("dpo", {}, ("logprobs", "ref_logprobs")),
} | {
    f"dpo-{kind}": ("dpo", {"loss_types": [kind]} | more, ("logprobs", "ref_logprobs"))
    for kind, more in (
        ("hinge", {"beta": 1.0}), ("ipo", {}), ("nca_pair", {}), ("bco_pair", {}), ("sppo_hard", {}), ("apo_zero", {}), ("apo_down", {}), ("sigmoid_norm", {}),
        ("robust", {"label_smoothing": 0.1}), ("exo_pair", {"label_smoothing": 0.1}),
    )
}  # fmt: skip


def cases(data: Tensors, _: Path) -> tuple[Case, dict[str, Case]]:
    """Return who computed, and every case."""
    made_by = {name: version(name) for name in ("trl", "transformers", "torch")}
    found: dict[str, Case] = {}
    for name, (kind, told, reads) in TRL_CASES.items():
        given = (
            data
            if "old_logprobs" in reads or kind != "grpo"
            else {**data, "old_logprobs": data["rollout_logprobs"]}
        )
        trainer = getattr(import_module(f"trl.trainer.{kind}_trainer"), f"{kind.upper()}Trainer")
        run = trl_pairs if kind == "dpo" else trl_policy
        found[name] = {"theirs": told, "reads": reads, **run(trainer, given, told)}
    return made_by, found
