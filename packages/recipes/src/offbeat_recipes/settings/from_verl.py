"""What the settings of a verl run are here, and which have no counterpart (verl 0.5 to 0.8, `main_ppo`)."""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from offbeat_recipes.errors import SettingError
from offbeat_recipes.settings.described import described

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

_ROOTS = (
    "actor_rollout_ref",
    "algorithm",
    "critic",
    "custom_reward_function",
    "data",
    "reward",
    "reward_model",
    "trainer",
)
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"

_RENAMED = {
    "data.prompt_key": "task.columns.prompt",
    "data.train_batch_size": "trainer.prompts_per_step",
    "data.max_prompt_length": "task.max_prompt_tokens",
    "data.max_response_length": "sampling.max_tokens",
    "data.seed": "seed",
    f"{_MODEL}.path": "model.path",
    f"{_MODEL}.trust_remote_code": "model.trust_remote_code",
    f"{_MODEL}.enable_gradient_checkpointing": "engine.activation_checkpointing",
    f"{_MODEL}.enable_activation_offload": "engine.activation_offload",
    f"{_MODEL}.lora_rank": "engine.lora.rank",
    f"{_MODEL}.lora_alpha": "engine.lora.alpha",
    f"{_MODEL}.use_remove_padding": "engine.packing",
    f"{_ACTOR}.grad_clip": "engine.optimizer.max_grad_norm",
    f"{_ACTOR}.clip_ratio_low": "algorithm.clip_low",
    f"{_ACTOR}.clip_ratio_high": "algorithm.clip_high",
    f"{_ACTOR}.clip_ratio_c": "algorithm.dual_clip",
    f"{_ACTOR}.entropy_coeff": "algorithm.entropy_coef",
    f"{_ACTOR}.ppo_max_token_len_per_gpu": "engine.micro_batch_tokens",
    f"{_ACTOR}.ulysses_sequence_parallel_size": "engine.sequence_parallel_size",
    f"{_ACTOR}.use_torch_compile": "engine.compile",
    f"{_ACTOR}.optim.lr": "engine.optimizer.lr",
    f"{_ACTOR}.optim.weight_decay": "engine.optimizer.weight_decay",
    f"{_ACTOR}.optim.min_lr_ratio": "engine.optimizer.min_lr_ratio",
    f"{_ACTOR}.fsdp_config.param_offload": "engine.offload_parameters",
    f"{_ACTOR}.fsdp_config.optimizer_offload": "engine.offload_optimizer",
    f"{_ACTOR}.megatron.param_offload": "engine.offload_parameters",
    f"{_ACTOR}.megatron.optimizer_offload": "engine.offload_optimizer",
    f"{_ACTOR}.megatron.tensor_model_parallel_size": "engine.tensor_parallel_size",
    f"{_ACTOR}.megatron.pipeline_model_parallel_size": "engine.pipeline_parallel_size",
    f"{_ACTOR}.megatron.context_parallel_size": "engine.context_parallel_size",
    f"{_ACTOR}.megatron.expert_model_parallel_size": "engine.expert_parallel_size",
    f"{_ACTOR}.megatron.sequence_parallel": "engine.sequence_parallel",
    f"{_ROLLOUT}.name": "rollout",
    f"{_ROLLOUT}.n": "trainer.group_size",
    f"{_ROLLOUT}.temperature": "sampling.temperature",
    f"{_ROLLOUT}.gpu_memory_utilization": "rollout.gpu_memory_fraction",
    f"{_ROLLOUT}.tensor_model_parallel_size": "rollout.tensor_parallel_size",
    f"{_ROLLOUT}.max_num_seqs": "rollout.max_num_seqs",
    f"{_ROLLOUT}.enforce_eager": "rollout.enforce_eager",
    "algorithm.gamma": "algorithm.discount",
    "algorithm.lam": "algorithm.trace",
    "algorithm.filter_groups.enable": "algorithm.dynamic_sampling",
    "critic.optim.lr": "algorithm.critic_lr",
    "critic.model.path": "algorithm.critic_path",
    "critic.cliprange_value": "algorithm.value_clip",
    "trainer.critic_warmup": "algorithm.critic_warmup_steps",
    "trainer.total_epochs": "trainer.epochs",
    "trainer.total_training_steps": "trainer.steps",
    "trainer.max_actor_ckpt_to_keep": "trainer.keep_checkpoints",
    "trainer.experiment_name": "name",
    "trainer.default_local_dir": "run_dir",
}  # fmt: skip
"""Settings whose value is the same, or that of one in `_VALUES`."""
_VALUES: dict[str, tuple[str, dict[object, object]]] = {
    f"{_ACTOR}.strategy": ("engine", {"fsdp": "fsdp2", "fsdp2": "fsdp2", "megatron": "megatron"}),
    f"{_ACTOR}.kl_loss_type": (
        "algorithm.kl_estimator",
        {
            "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3",
            "k3+": "k3_plus", "abs": "abs",
        },
    ),
    f"{_ACTOR}.loss_agg_mode": (
        "algorithm.aggregation",
        {
            name.replace("_", "-"): name
            for name in ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm")
        },
    ),
    f"{_ACTOR}.optim.lr_scheduler_type": ("engine.optimizer.schedule", {"constant": "constant", "cosine": "cosine"}),
    f"{_ACTOR}.optim.warmup_style": ("engine.optimizer.schedule", {"constant": "constant", "cosine": "cosine"}),
    f"{_ACTOR}.fsdp_config.model_dtype": ("model.dtype", {"fp32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}),
    "algorithm.adv_estimator": (
        "algorithm",
        {
            "grpo": "grpo", "rloo": "rloo", "gae": "ppo", "remax": "remax", "gpg": "gpg", "gdpo": "gdpo",
            "reinforce_plus_plus": "reinforce_pp", "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
        },
    ),
    "data.filter_overlong_prompts": ("task.overlong", {True: "filter", False: "refuse"}),
    "trainer.resume_mode": ("resume", {"auto": "auto", "disable": "never"}),
}  # fmt: skip
_ABSENT = {
    "data.truncation": "prompts are never cut: task.overlong refuses them or leaves them out",
    "data.shuffle": "rows are always shuffled, by the seed and the epoch",
    f"{_ACTOR}.ppo_epochs": "a completion is trained once; trainer.updates_per_step cuts a step into mini-batches",
    f"{_ACTOR}.use_dynamic_bsz": "micro-batches are always made by tokens (engine.micro_batch_tokens)",
    f"{_ROLLOUT}.top_p": "log-probs are those of the whole distribution, so the sampler keeps all of it",
    f"{_ROLLOUT}.top_k": "log-probs are those of the whole distribution, so the sampler keeps all of it",
    f"{_ROLLOUT}.val_kwargs.n": "validation is greedy; `offbeat eval RUN --samples N` draws several",
    f"{_ROLLOUT}.val_kwargs.temperature": "validation is greedy; `offbeat eval RUN --temperature T`",
    f"{_ROLLOUT}.calculate_log_probs": "a completion always has the sampler's log-probs",
    f"{_ROLLOUT}.free_cache_engine": "with cluster.placement=colocated a replica always gives its memory away while ranks train",
    f"{_ROLLOUT}.multi_turn.enable": "give an environment: environment.path=FILE.py:Class (docs/environments.md)",
    "algorithm.use_kl_in_reward": "algorithm.kl_in=reward, with algorithm.kl_coef, and algorithm.kl_target where it follows",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm=dr_grpo is GRPO without the division",
    "trainer.project_name": "the variable WANDB_PROJECT names it",
    "trainer.val_before_train": "validation is made before the first step, unless trainer.validation_prompts=0",
}
_DEFAULTS: dict[str, object] = {
    "data.train_batch_size": 1024, "data.max_prompt_length": 512, "data.max_response_length": 512,
    f"{_MODEL}.enable_gradient_checkpointing": True,
    f"{_ACTOR}.ppo_mini_batch_size": 256, f"{_ACTOR}.clip_ratio": 0.2, f"{_ACTOR}.clip_ratio_c": 3.0,
    f"{_ACTOR}.optim.weight_decay": 0.01, f"{_ACTOR}.optim.betas": [0.9, 0.999],
    f"{_ROLLOUT}.n": 1, f"{_ROLLOUT}.gpu_memory_utilization": 0.5, f"{_ROLLOUT}.tensor_model_parallel_size": 2,
    "algorithm.adv_estimator": "gae", "algorithm.lam": 1.0, "trainer.total_epochs": 30,
}  # fmt: skip
"""What verl takes where nothing is set, as far as it decides what is trained and ours is another (`ppo_trainer.yaml` of verl 0.6)."""
_BY_TOKENS = re.compile(r"micro_batch_size|log_prob_max_token_len|use_dynamic_bsz")
_COMPUTED = frozenset(
    {
        "data.train_files", "data.val_files", f"{_ACTOR}.ppo_mini_batch_size", f"{_ACTOR}.clip_ratio", f"{_ACTOR}.use_kl_loss",
        f"{_ACTOR}.kl_loss_coef", f"{_ACTOR}.fsdp_config.fsdp_size", f"{_ACTOR}.optim.lr_warmup_steps", f"{_ACTOR}.optim.betas", f"{_ROLLOUT}.max_model_len",
        f"{_MODEL}.target_modules", "trainer.n_gpus_per_node", "trainer.nnodes", "trainer.save_freq", "trainer.test_freq", "trainer.logger",
        "custom_reward_function.path", "custom_reward_function.name",
        "reward.custom_reward_function.path", "reward.custom_reward_function.name",
    }
)  # fmt: skip
_TRACKERS = {"tensorboard", "wandb", "trackio"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Settings of ours by name, and for each of verl's without a counterpart what to know; "" where nothing is known of it."""

    settings: dict[str, object] = field(default_factory=dict[str, object])
    absent: dict[str, str] = field(default_factory=dict[str, str])


def read_verl(path: Path) -> dict[str, object]:
    """Return the settings of verl in `path` by dotted name.

    `path` is a YAML file of a run (`.hydra/overrides.yaml` has those that were set), or the shell script that starts one.

    Raises:
        SettingError: there are none.
    """
    text = path.read_text(encoding="utf-8")
    try:
        read: Any = None if path.suffix == ".sh" else yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SettingError([f"{path}: no YAML that can be read: {error}"]) from error
    if isinstance(read, dict):
        whole, found = OmegaConf.create(cast("dict[str, Any]", read)), dict[str, object]()
        for key, value in _flat(cast("dict[str, Any]", read)):
            found[key] = value
            with suppress(
                OmegaConfBaseException
            ):  # one that leads to what is not there stays as it is written
                found[key] = OmegaConf.select(whole, key, default=value)
    else:
        words = [str(word) for word in cast("list[object]", read)] if isinstance(read, list) else _words(text)
        pairs = (word.lstrip("+").partition("=") for word in words)
        found = {key: yaml.safe_load(value) for key, mark, value in pairs if mark}
    found = {key: value for key, value in found.items() if key.split(".")[0] in _ROOTS and "." in key}
    if not found:
        raise SettingError([f"{path}: no setting of verl; expected names like data.train_batch_size"])
    return found


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(cast("dict[str, Any]", value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _words(script: str) -> list[str]:
    """Return the words of a shell script, with the variables that it sets itself filled in."""
    words = shlex.split(script.replace("\\\n", " "), comments=True)
    known: dict[str, str] = {}

    def fill(word: str) -> str:
        named = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)")
        return named.sub(lambda found: known.get(found[1] or found[3], found[2] or found[0]), word)

    for word in words:
        name, mark, value = word.partition("=")
        if mark and name.isidentifier():
            known[name] = fill(value)
    return [fill(word) for word in words]


def translated(verl: Mapping[str, object]) -> Imported:
    """Return what verl's settings are here. Values that are null in verl are left out: they are not set."""
    made = Imported(settings={"task": "file"})
    known = {*_RENAMED, *_VALUES, *_COMPUTED}
    unset = [key for key, value in verl.items() if isinstance(value, str) and "$" in value and key in known]
    made.absent.update(dict.fromkeys(unset, "a variable that the script does not set; give its value"))
    set_ones = {
        **_DEFAULTS,
        **{key: value for key, value in verl.items() if value is not None and key not in unset},
    }
    for key, value in set_ones.items():
        if key in _RENAMED:
            made.settings[_RENAMED[key]] = value
        elif key in _VALUES:
            name, values = _VALUES[key]
            if value in values:
                made.settings[name] = values[value]
            else:
                choices = ", ".join(map(str, dict.fromkeys(values.values())))
                made.absent[key] = f"{name} has {choices}" + (
                    "; docs/algorithms.md" if name == "algorithm" else ""
                )
        elif key in _ABSENT or _BY_TOKENS.search(key):
            made.absent[key] = _ABSENT.get(key, _ABSENT[f"{_ACTOR}.use_dynamic_bsz"])
        elif key not in _COMPUTED:
            made.absent[key] = ""
    for compute in (_data, _batches, _loss, _cluster, _reporting, _reward):
        compute(made, set_ones.get)
    _leave_out_foreign(made, {_RENAMED[key] for key in verl if key in _RENAMED})
    return made


def _leave_out_foreign(made: Imported, asked: set[str]) -> None:
    """Leave out settings that another engine, algorithm or adapter than the chosen one has; those of `asked` are named."""
    chosen = {
        f"{group}={made.settings[group]}"
        for group in ("algorithm", "engine", "rollout", "task")
        if group in made.settings
    }
    chosen |= {
        f"{group}={name}"
        for group, name in (("engine", "fsdp2"), ("rollout", "vllm"))
        if group not in made.settings
    }
    for item in described():
        if item.path in made.settings and item.groups and not chosen & {*item.groups}:
            value = made.settings.pop(item.path)
            if item.path in asked:
                made.absent[item.path] = f"{value} is for {', '.join(item.groups)}"


def _data(made: Imported, verl: Callable[..., Any]) -> None:
    for key, ours in (("data.train_files", "task.train_path"), ("data.val_files", "task.validation_path")):
        files = verl(key)
        if isinstance(files, list) and len(cast("list[object]", files)) == 1:
            files = cast("list[object]", files)[0]
        if files:
            made.settings[ours] = files
    lengths = (verl("data.max_prompt_length"), verl("data.max_response_length"))
    longest = verl(f"{_ROLLOUT}.max_model_len") or (sum(lengths) if None not in lengths else None)
    if longest:
        made.settings["rollout.max_model_len"] = longest


def _batches(made: Imported, verl: Callable[..., Any]) -> None:
    batch, mini = verl("data.train_batch_size"), verl(f"{_ACTOR}.ppo_mini_batch_size")
    if isinstance(batch, int) and isinstance(mini, int) and mini:
        made.settings["trainer.updates_per_step"] = max(1, batch // mini)
        if batch % mini:
            made.absent[f"{_ACTOR}.ppo_mini_batch_size"] = (
                f"a step is cut into equal mini-batches, and {mini} do not divide {batch}"
            )
    made.settings["engine.optimizer.beta1"], made.settings["engine.optimizer.beta2"] = verl(
        f"{_ACTOR}.optim.betas"
    )
    if "trainer.steps" in made.settings:
        made.settings.pop("trainer.epochs", None)
    warmup = verl(f"{_ACTOR}.optim.lr_warmup_steps")
    if isinstance(warmup, int) and warmup > 0:
        made.settings["engine.optimizer.warmup_steps"] = warmup
    for key, ours in (
        ("trainer.save_freq", "trainer.save_every"),
        ("trainer.test_freq", "trainer.validate_every"),
    ):
        if (every := verl(key)) is not None:
            made.settings[ours] = max(0, every)


def _loss(made: Imported, verl: Callable[..., Any]) -> None:
    clip = verl(f"{_ACTOR}.clip_ratio")
    for side in ("low", "high"):
        if clip is not None and verl(f"{_ACTOR}.clip_ratio_{side}") is None:
            made.settings[f"algorithm.clip_{side}"] = clip
    if verl(f"{_ACTOR}.use_kl_loss"):
        made.settings["algorithm.kl_coef"] = verl(f"{_ACTOR}.kl_loss_coef", 0.001)
    size = verl(f"{_ACTOR}.fsdp_config.fsdp_size")
    if size is not None:
        made.settings["engine.shard_size"] = max(0, size)
    targets = verl(f"{_MODEL}.target_modules")
    if targets not in (None, "all-linear"):
        made.settings["engine.lora.targets"] = targets


def _cluster(made: Imported, verl: Callable[..., Any]) -> None:
    num_gpus = verl("trainer.n_gpus_per_node", 0) * verl("trainer.nnodes", 1)
    if num_gpus:
        each = verl(f"{_ROLLOUT}.tensor_model_parallel_size", 1)
        made.settings.update(
            {
                "device": "cuda",
                "cluster.placement": "colocated",
                "engine.num_ranks": num_gpus,
                "rollout.num_replicas": max(1, num_gpus // each),
            }
        )
        made.settings.setdefault("model.dtype", "bfloat16")


def _reporting(made: Imported, verl: Callable[..., Any]) -> None:
    loggers = verl("trainer.logger")
    names = [loggers] if isinstance(loggers, str) else cast("list[str]", loggers or [])
    if names:
        made.settings["report.trackers"] = [name for name in names if name in _TRACKERS]
    unknown = [name for name in names if name not in {*_TRACKERS, "console"}]
    if unknown:
        made.absent["trainer.logger"] = (
            f"{', '.join(unknown)}: name a reporter of your own (docs/plug-ins.md)"
        )


def _reward(made: Imported, verl: Callable[..., Any]) -> None:
    for key in ("custom_reward_function", "reward.custom_reward_function"):
        if path := verl(f"{key}.path"):
            name = verl(f"{key}.name", "compute_score")
            made.settings["task.reward"] = f"{path}:{name}"
    if "task.reward" not in made.settings:
        made.absent.setdefault(
            "custom_reward_function.path",
            "verl scores by data_source; give task.reward=FILE.py:function, or task=gsm8k",
        )
