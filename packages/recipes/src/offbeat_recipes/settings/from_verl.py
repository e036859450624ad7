"""What the settings of a verl run are here, and which have no counterpart (verl 0.5 to 0.8, `main_ppo`), by the tables of from_verl.toml."""

from __future__ import annotations

import re
import shlex
import tomllib
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from offbeat_recipes.errors import SettingError
from offbeat_recipes.settings.described import described
from offbeat_recipes.settings.reading import flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

_ROOTS = {
    "actor_rollout_ref",
    "algorithm",
    "critic",
    "custom_reward_function",
    "data",
    "reward",
    "reward_model",
    "trainer",
}
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"

_BY_TOKENS = re.compile(r"micro_batch_size|log_prob_max_token_len|use_dynamic_bsz")
_TRACKERS = {"tensorboard", "wandb", "trackio"}


class _Tables(NamedTuple):
    """The parts of from_verl.toml, which says what each is, by dotted names of verl's."""

    same: dict[str, str]
    values: dict[str, tuple[str, dict[str, str]]]
    absent: dict[str, str]
    defaults: dict[str, object]
    computed: list[str]


@cache
def _tables() -> _Tables:
    text = (files("offbeat_recipes") / "settings" / "from_verl.toml").read_text(encoding="utf-8")
    parts = tomllib.loads(text)
    flat: dict[str, Any] = {name: flatten(parts[name]) for name in parts if name != "computed"}
    return _Tables(computed=parts["computed"], **flat)


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
        for key, value in flatten(cast("dict[str, Any]", read)).items():
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
    made, tables = Imported(settings={"task": "file"}), _tables()
    known = {*tables.same, *tables.values, *tables.computed}
    unset = [key for key, value in verl.items() if isinstance(value, str) and "$" in value and key in known]
    made.absent.update(dict.fromkeys(unset, "a variable that the script does not set; give its value"))
    known_values = {key: value for key, value in verl.items() if value is not None and key not in unset}
    set_ones = {**tables.defaults, **known_values}
    for key, value in set_ones.items():
        if key in tables.same:
            made.settings[tables.same[key]] = value
        elif key in tables.values:
            name, values = tables.values[key]
            word = str(value).lower() if isinstance(value, bool) else value
            if word in values:
                made.settings[name] = values[str(word)]
            else:
                more = "; docs/algorithms.md" if name == "algorithm" else ""
                made.absent[key] = f"{name} has {', '.join(dict.fromkeys(values.values()))}{more}"
        elif key in tables.absent or _BY_TOKENS.search(key):
            made.absent[key] = tables.absent.get(key, tables.absent[f"{_ACTOR}.use_dynamic_bsz"])
        elif key not in tables.computed:
            made.absent[key] = ""
    for compute in (_data, _batches, _loss, _cluster, _reporting, _reward):
        compute(made, set_ones.get)
    _leave_out_foreign(made, {tables.same[key] for key in verl if key in tables.same})
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
        paths = verl(key)
        if isinstance(paths, list) and len(cast("list[object]", paths)) == 1:
            paths = cast("list[object]", paths)[0]
        if paths:
            made.settings[ours] = paths
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
