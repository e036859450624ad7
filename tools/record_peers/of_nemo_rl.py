"""What NeMo-RL computes. Its modules import a cluster, so the definitions that compute are run alone, out of a checkout."""

# ruff: noqa: ANN401 what NeMo-RL defines

# What another library's code takes and gives has no types here.
# pyright: basic, reportAttributeAccessIssue=false, reportAssignmentType=false, reportArgumentType=false

from __future__ import annotations

import ast
import hashlib
from enum import Enum
from functools import partial
from importlib import import_module
from importlib.metadata import version
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from common import LOSS, B, Case, G, Tensors, differentiated

if TYPE_CHECKING:
    from pathlib import Path

NEMO_FILES = {
    "utils.py": ("calculate_kl", "calculate_baseline_and_std_per_prompt", "masked_mean", "masked_var", "get_gdpo_reward_component_keys"),
    "loss/loss_functions.py": ("ClippedPGLossConfig", "ClippedPGLossFn", "NLLLossFn", "PreferenceLossFn", "DPOLossConfig", "DPOLossFn", "MseValueLossConfig", "MseValueLossFn"),
    "advantage_estimator.py": ("AdvEstimatorConfig", "GAEConfig", "GRPOAdvantageEstimator", "GDPOAdvantageEstimator", "ReinforcePlusPlusAdvantageEstimator", "GeneralizedAdvantageEstimator", "OPDAdvantageEstimator"),
}  # fmt: skip
NEMO_COMMITS = {
    "loss/loss_functions.py": "006907a9570734f3e5d484c08ada84b0b89224c9",
    "advantage_estimator.py": "00925dd1e44b816b5cb6afa27d23d7bd7af2b957",
}
NEMO_LOSS: Case = {"reference_policy_kl_penalty": 0.0}
NEMO_CASES: dict[str, tuple[str, Case, Case, tuple[str, ...]]] = {
    "grpo-leave-one-out-kl": ("GRPO", {}, {}, ("rewards", "logprobs", "ref_logprobs")),
    "grpo-leave-one-out": ("GRPO", {}, NEMO_LOSS, LOSS),
    "grpo": ("GRPO", {"use_leave_one_out_baseline": False}, NEMO_LOSS, LOSS),
    "grpo-dual_clip": ("GRPO", {"use_leave_one_out_baseline": False}, {**NEMO_LOSS, "ratio_clip_c": 3.0}, LOSS),
    "grpo-sequence": ("GRPO", {"use_leave_one_out_baseline": False}, {**NEMO_LOSS, "token_level_loss": False}, LOSS),
    "grpo-kl": ("GRPO", {"use_leave_one_out_baseline": False}, {}, ("rewards", "logprobs", "ref_logprobs")),
    "grpo-kl-off_policy": ("GRPO", {"use_leave_one_out_baseline": False}, {}, (*LOSS, "ref_logprobs")),
    "grpo-tis": ("GRPO", {"use_leave_one_out_baseline": False}, {**NEMO_LOSS, "use_importance_sampling_correction": True, "truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 1.3}, (*LOSS, "rollout_logprobs")),
    "grpo-icepop": ("GRPO", {"use_leave_one_out_baseline": False}, {**NEMO_LOSS, "use_importance_sampling_correction": True, "truncated_importance_sampling_type": "icepop", "truncated_importance_sampling_ratio_min": 0.7, "truncated_importance_sampling_ratio": 1.3}, (*LOSS, "rollout_logprobs")),
    "dr_grpo": ("GRPO", {"use_leave_one_out_baseline": False, "normalize_rewards": False}, NEMO_LOSS, LOSS),
    "rloo": ("GRPO", {"normalize_rewards": False}, NEMO_LOSS, LOSS),
    "cispo": ("GRPO", {"use_leave_one_out_baseline": False}, {**NEMO_LOSS, "use_cispo": True, "ratio_clip_min": 10.0}, LOSS),
    "gspo": ("GRPO", {"use_leave_one_out_baseline": False}, {**NEMO_LOSS, "sequence_level_importance_ratios": True, "token_level_loss": False, "ratio_clip_min": 3e-4, "ratio_clip_max": 4e-4}, LOSS),
    "gdpo": ("GDPO", {"use_leave_one_out_baseline": False}, NEMO_LOSS, (*LOSS, "reward_parts")),
    "dapo": ("GRPO", {"use_leave_one_out_baseline": False}, {**NEMO_LOSS, "ratio_clip_max": 0.28}, LOSS),
    "reinforce_pp": ("RPP", {"minus_baseline": False}, NEMO_LOSS, LOSS),
    "reinforce_pp_baseline": ("RPP", {}, NEMO_LOSS, LOSS),
    "ppo": ("GAE", {}, NEMO_LOSS, ("turn_mask", *LOSS, "values", "new_values")),
    "dpo": ("DPO", {}, {}, ("logprobs", "ref_logprobs")),
    "distill": ("OPD", {}, NEMO_LOSS, ("logprobs", "teacher_logprobs")),
}  # fmt: skip


class _Any(Enum):
    """The members that NeMo-RL's enums of losses have."""

    TOKEN_LEVEL = "token"
    SEQUENCE_LEVEL = "sequence"
    LOGPROB = "logprob"
    LOGIT = "logit"
    TOKENS = "tokens"
    SEQUENCES = "sequences"
    NONE = "none"


def nemo_definitions(checkout: Path) -> tuple[SimpleNamespace, dict[str, str]]:
    """Run the definitions of `NEMO_FILES` alone; return them, and a hash of each."""
    typing, pydantic = import_module("typing"), import_module("pydantic")
    scope: dict[str, Any] = {
        name: getattr(typing, name) for name in ("Any", "Literal", "Optional", "TypeVar")
    }
    scope |= {
        "torch": torch,
        "Tensor": torch.Tensor,
        "BaseModel": pydantic.BaseModel,
        "BatchedDataDict": dict,
    }
    scope |= {"LossFunction": object, "LossType": _Any, "LossInputType": _Any, "MetricNormalizer": _Any}
    scope |= dict.fromkeys(("ClippedPGLossDataDict", "DPOLossDataDict", "PreferenceLossDataDict"), str)
    hashes: dict[str, str] = {}
    for file, names in NEMO_FILES.items():
        tree = ast.parse((checkout / "nemo_rl/algorithms" / file).read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in names:
                for inner in ast.walk(node):
                    if (
                        isinstance(inner, ast.ClassDef | ast.FunctionDef)
                        and ast.get_docstring(inner) is not None
                    ):
                        inner.body = inner.body[1:] or [ast.Pass()]
                source = ast.unparse(node)
                hashes[node.name] = hashlib.sha256(source.encode()).hexdigest()[:16]
                exec(compile(source, file, "exec", dont_inherit=True), scope)
    return SimpleNamespace(**scope), hashes


def nemo_advantages(
    nemo: SimpleNamespace, kind: str, told: Case, loss: Any, data: Tensors, mask: torch.Tensor
) -> Case:
    """Return what the estimator `kind` makes of the rewards."""
    prompts = torch.arange(B // G).repeat_interleave(G)[:, None]
    if kind == "OPD":
        estimator = nemo.OPDAdvantageEstimator({}, {})
        given = {"teacher_logprobs": data["teacher_logprobs"], "prev_logprobs": data["logprobs"]}
        return {"advantages": estimator.compute_advantage(prompts, data["rewards"], mask, **given)}
    if kind == "GAE":
        estimator = nemo.GeneralizedAdvantageEstimator(nemo.GAEConfig(**told), loss)
        advantages, returns = estimator.compute_advantage(prompts, data["rewards"], mask, data["values"])
        return {"advantages": advantages, "returns": returns * mask}
    name = {"GRPO": "GRPO", "GDPO": "GDPO", "RPP": "ReinforcePlusPlus"}[kind]
    estimator = getattr(nemo, f"{name}AdvantageEstimator")(nemo.AdvEstimatorConfig(**told), loss)
    parts = {f"reward/{index}": column for index, column in enumerate(data["reward_parts"].T)}
    rewards = data["rewards"].clone()
    return {"advantages": estimator.compute_advantage(prompts, rewards, mask, repeated_batch=parts) * mask}


def nemo_case(nemo: SimpleNamespace, spec: tuple[str, Case, Case, tuple[str, ...]], data: Tensors) -> Case:
    """Return one case. NeMo-RL's tensors have a place for the token before the first."""
    kind, told, loss_told, reads = spec
    mask = data["turn_mask" if "turn_mask" in reads else "mask"]
    counts = {"global_valid_seqs": torch.tensor(float(B)), "global_valid_toks": mask.sum()}
    before = partial(torch.nn.functional.pad, pad=(1, 0))
    batch = {"token_mask": before(mask), "sample_mask": torch.ones(B)}
    if kind == "DPO":
        pairs = torch.arange(B).view(2, -1).T.flatten()  # chosen and rejected in turns
        batch |= {"token_mask": before(mask[pairs]), "reference_policy_logprobs": torch.nn.functional.pad(data["ref_logprobs"][pairs], (0, 1))}  # fmt: skip
        loss_fn = nemo.DPOLossFn(nemo.DPOLossConfig())
        return differentiated(data, lambda leaf: loss_fn(leaf[pairs], batch, **counts)[0])
    config = nemo.ClippedPGLossConfig(**loss_told)
    found = nemo_advantages(nemo, kind, told, config, data, mask)
    old = data["old_logprobs" if "old_logprobs" in reads else "logprobs"]
    batch |= {"advantages": before(found["advantages"]), "prev_logprobs": before(old), "generation_logprobs": before(data["rollout_logprobs"]), "reference_policy_logprobs": before(data["ref_logprobs"])}  # fmt: skip
    loss_fn = nemo.ClippedPGLossFn(config)
    found |= differentiated(data, lambda leaf: loss_fn(leaf, batch, **counts)[0])
    if kind == "GAE":
        value_loss = nemo.MseValueLossFn(nemo.MseValueLossConfig(cliprange=0.5))
        held = {
            "token_mask": mask,
            "sample_mask": torch.ones(B),
            "returns": found["returns"],
            "values": data["values"],
        }
        critic = differentiated(data, lambda leaf: value_loss(leaf, held, **counts)[0], key="new_values")
        found |= {"value_loss": critic["loss"], "value_gradient": critic["gradient"]}
    return found


def cases(data: Tensors, checkout: Path) -> tuple[Case, dict[str, Case]]:
    """Return who computed, and every case."""
    nemo, hashes = nemo_definitions(checkout)
    found = {
        name: {"theirs": {**spec[1], **spec[2]}, "reads": spec[3], **nemo_case(nemo, spec, data)}
        for name, spec in NEMO_CASES.items()
    }
    return {"torch": version("torch"), "commits": NEMO_COMMITS, "definitions": hashes}, found
