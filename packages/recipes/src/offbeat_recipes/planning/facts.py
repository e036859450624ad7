"""What a plan needs to know of this machine and of what is installed: looked up here, so that planning is pure."""

# transformers is typed in part; models are built on the meta device here, which holds no weights.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from offbeat_engine.config import Refusal
from offbeat_engine.interface import engine_class
from offbeat_recipes.errors import TaskError
from offbeat_recipes.planning.algorithm import algorithm_of, algorithm_refusals, offloads, recomputes, sleeps
from offbeat_recipes.planning.lengths import length_refusals, shape_of, stop_refusals, token_refusals
from offbeat_recipes.planning.machine import machine_refusals, weight_refusals
from offbeat_recipes.planning.replay import replay_refusals
from offbeat_recipes.settings.hub import absent_model, absent_rows
from offbeat_recipes.tasks.base import make_task
from offbeat_recipes.tasks.config import (
    ROW_FILES,
    CharTaskConfig,
    FileConfig,
    PairsConfig,
    PromptConfig,
    RowsConfig,
)
from offbeat_recipes.tasks.registry import task_class
from offbeat_recipes.tasks.rows import row_files
from offbeat_rollout import ConfigError as RolloutConfigError
from offbeat_rollout.toolkit.registry import adapter_class
from offbeat_trainer.algorithms.registry import algorithm_class
from offbeat_trainer.errors import PlanRefused
from offbeat_trainer.rollouts.own import find_rollout

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from transformers import PretrainedConfig

    from offbeat_recipes.settings.tree import RunConfig

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The shape of the model. Tied weights count once, experts in both numbers; `max_positions` 0 means: not said.

    `num_experts` are those of a layer that lie in one tensor, 0 without any. `experts_per_token` are those that a token goes to, over all layers.
    """

    num_params: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    num_expert_params: int = 0
    num_experts: int = 0
    experts_per_token: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was found. `refusals` are those of the parts themselves: engine, adapter, files, model folder.

    `num_gpus` and `gpu_gib` are 0 where there are none, and where processes run on the machines of a cluster; a setting may say what
    a GPU there has.
    `num_train_prompts` and `longest_answer_tokens` are 0 where they are not known without reading the data.
    `role_models` are those of the algorithm's roles that have a folder of their own. `loads_whole`: the folder has no safetensors, by
    which each rank would read no more than its part.
    `offloads` and `sleeps`: engine and replicas can leave a device to the other while they rest.
    `recomputes`: replicas can compute keys and values of what is under way again. `reads_sampler`: the policy's loss depends on the
    sampler's log-probs.
    """

    num_cores: int
    num_gpus: int
    gpu_gib: float
    ram_gib: float
    model: ModelFacts | None = None
    role_models: Mapping[str, ModelFacts] = field(default_factory=dict[str, ModelFacts])
    loads_whole: bool = False
    max_prompt_tokens: int = 0
    num_train_prompts: int = 0
    longest_answer_tokens: int = 0
    offloads: bool = False
    sleeps: bool = False
    recomputes: bool = False
    reads_sampler: bool = True
    refusals: tuple[Refusal, ...] = ()


def gather_facts(config: RunConfig, *, opens_data: bool = False) -> Facts:
    """Look up what planning `config` needs. Imports torch; starts nothing, reads through weights and keeps none.

    With `opens_data` the task is made, its data read and its rewards imported; a command that then runs does so itself, before
    anything starts.
    """
    import torch

    of_algorithm, reads_sampler = algorithm_refusals(config)
    refusals = [
        *_parts(config),
        *of_algorithm,
        *_files(config),
        *machine_refusals(config),
        *replay_refusals(config),
    ]
    model: ModelFacts | None = None
    role_models: dict[str, ModelFacts] = {}
    num_prompts = prompt_tokens = answer_tokens = 0
    try:
        model = _model(config)
        if not any(one.setting == "algorithm" for one in refusals):
            role_models = _role_models(config)
            refusals += [*token_refusals(config), *weight_refusals(config, refusals)]
        opens = opens_data and not any(one.setting.startswith(("task", "model.path")) for one in refusals)
        num_prompts, prompt_tokens, answer_tokens, too_long = _task(config, opens=opens)
        refusals += [*too_long, *([] if model is None else stop_refusals(config, model.vocab_size))]
    except (TaskError, OSError, ValueError) as error:
        refusals.append(_refused_value(error, config))
    # GPUs of a cluster are not this machine's: nothing is known of them.
    on_cuda = config.device == "cuda" and not config.cluster.ray_address and torch.cuda.is_available()
    return Facts(
        num_cores=len(os.sched_getaffinity(0)),
        num_gpus=torch.cuda.device_count() if on_cuda else 0,
        gpu_gib=config.cluster.device_memory_gib
        or (torch.cuda.get_device_properties(0).total_memory / GIB if on_cuda else 0.0),
        ram_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB,
        model=model,
        role_models=role_models,
        loads_whole=_loads_whole(config),
        max_prompt_tokens=prompt_tokens,
        num_train_prompts=num_prompts,
        longest_answer_tokens=answer_tokens,
        offloads=not refusals and offloads(config),
        sleeps=not refusals and sleeps(config),
        recomputes=not refusals and recomputes(config),
        reads_sampler=reads_sampler,
        refusals=tuple(refusals),
    )


def model_facts(shape: PretrainedConfig, *, trust_remote_code: bool = False) -> ModelFacts:
    """Return the facts of a Hugging Face config; parameters are counted on the meta device.

    Raises:
        ValueError: transformers makes no model of it, whatever its code raises over that.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shape, trust_remote_code=trust_remote_code)
    except Exception as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"model.path: transformers makes no model of its config.json ({said})") from error
    text = shape.get_text_config()
    heads = int(getattr(text, "num_attention_heads", 0) or 0)  # a family without attention has none
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    if kv_heads and heads % kv_heads:
        raise ValueError(
            f"model.path: its config.json has {heads} attention heads that cannot share {kv_heads} key-value heads equally"
        )
    of_experts = {name: param for name, param in model.named_parameters() if ".experts." in name}
    mixtures = {name.partition(".experts.")[0] for name in of_experts}
    return ModelFacts(
        num_params=sum(parameter.numel() for parameter in model.parameters()),
        num_layers=int(text.num_hidden_layers),
        hidden_size=int(text.hidden_size),
        vocab_size=int(text.vocab_size),
        num_kv_heads=kv_heads,
        head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // max(1, heads)),
        max_positions=int(getattr(text, "max_position_embeddings", 0)),
        num_expert_params=sum(param.numel() for param in of_experts.values()),
        num_experts=max((len(param) for param in of_experts.values() if param.dim() > 2), default=0),
        experts_per_token=len(mixtures) * int(getattr(text, "num_experts_per_tok", 0) or 0),
    )


def _parts(config: RunConfig) -> list[Refusal]:
    """Return what engine and adapter refuse of the model, which is made for them where the task makes it."""
    with TemporaryDirectory() as scratch:
        path = config.model.path or _made(config, Path(scratch))
        return [*_engine(config, path), *_rollout(config, path)]


def _engine(config: RunConfig, path: str) -> list[Refusal]:
    engine = engine_class(config.engine.name)
    found = engine.check(config.engine_config(path), config.engine.num_ranks)
    return [Refusal(_our_name(item.setting), item.reason, item.remedy) for item in found]


def _made(config: RunConfig, folder: Path) -> str:
    """Return the model that the task makes, tiny as it is; "" where none can be made, as is said elsewhere."""
    if not isinstance(config.task, CharTaskConfig):
        return ""
    try:
        return str(make_task(config.task, "", config.seed).model_folder(folder, config.seed))
    except (TaskError, OSError, ValueError):
        return ""


def _our_name(setting: str) -> str:
    """Return the setting of the run that decides an engine's own setting."""
    if setting == "device" or setting.startswith("model"):
        return setting
    return "model.dtype" if setting == "dtype" else f"engine.{setting}"


def _rollout(config: RunConfig, path: str) -> Iterator[Refusal]:
    if not config.generates:
        return
    adapter, told = adapter_class(config.rollout.name), config.rollout_config(path)
    for setting, replica in (("rollout", replace(told, stop_strings=False)), ("sampling.stop", told)):
        try:
            adapter.check(replica)
        except RolloutConfigError as error:
            yield Refusal(setting, str(error), "choose what the adapter offers, or another adapter")
            break
    if config.rollout.name == "vllm" and find_spec("vllm") is None:
        yield Refusal(
            "rollout.name", "vLLM is not installed", "install the dependency group cpu or gpu, or rollout=hf"
        )


def _learnable(config: RunConfig) -> Iterator[Refusal]:
    """Refuse a task that has not what the algorithm learns from."""
    reads = getattr(algorithm_class(config.algorithm.name), "reads", None)
    if isinstance(config.task, PairsConfig) and config.generates and not config.reward.model:
        yield Refusal(
            "algorithm",
            f"{config.algorithm.name} takes rewards, and pairs have none",
            "algorithm=dpo, or a reward model's folder as reward.model",
        )
    if reads is not None and reads != "examples" and not hasattr(task_class(config.task.name), reads):
        yield Refusal(
            "task",
            f"{config.algorithm.name} learns from {reads}, and {config.task.name} has none",
            "task=pairs",
        )
    if (folder := config.reward.model) and not (Path(folder) / "config.json").is_file():
        reason, remedy = absent_model(folder)
        yield Refusal("reward.model", reason, f"{remedy}; algorithm=reward_model makes one")


def _files(config: RunConfig) -> Iterator[Refusal]:
    yield from _environment(config)
    yield from _own_rollout(config)
    yield from _learnable(config)
    if isinstance(config.task, RowsConfig):
        yield from _rows(config, config.task)
    if isinstance(config.task, PromptConfig) and not config.model.path:
        yield Refusal("model.path", "not given, and this task makes no model", "name a Hugging Face folder")


def _rows(config: RunConfig, task: RowsConfig) -> Iterator[Refusal]:
    for key in ROW_FILES:
        if not task.paths(key) and (key == "train_path" or config.trainer.validation_prompts):
            yield Refusal(f"task.{key}", "not given", "name a JSONL, parquet or CSV file")
        for path in task.paths(key):
            if not row_files(path):
                yield Refusal(f"task.{key}", *absent_rows(path))
    scored = config.scored_apart or not config.generates or bool(config.reward.model)
    if isinstance(task, FileConfig) and not task.reward and not scored:
        yield Refusal("task.reward", "not given", "name package.module:function or file.py:function")


def _environment(config: RunConfig) -> Iterator[Refusal]:
    """Refuse an environment that cannot be made: it is imported here, and one is made where that is a function's affair."""
    if config.turns is None:
        return
    from offbeat_trainer import find_environment

    try:
        find_environment(config.turns.path, config.turns.args)
    except PlanRefused as error:
        yield Refusal("environment.path", str(error), "name package.module:Name or file.py:Name")


def _own_rollout(config: RunConfig) -> Iterator[Refusal]:
    """Refuse a rollout that cannot be made: it is imported here."""
    try:
        if config.own_rollout:
            find_rollout(config.own_rollout, config.environment.args)
    except PlanRefused as error:
        yield Refusal("environment.rollout", str(error), "name a class, package.module:Name or file.py:Name")


def _model(config: RunConfig) -> ModelFacts | None:
    if config.model.path:
        if not (Path(config.model.path) / "config.json").is_file():
            raise ValueError("; ".join(absent_model(config.model.path)))
        return _facts_of(config, config.model.path)
    if isinstance(config.task, CharTaskConfig):
        from offbeat_recipes.tasks.chars import CharTask, char_model_config

        task = make_task(config.task, "", config.seed)
        assert isinstance(task, CharTask)
        return model_facts(char_model_config(task.shape), trust_remote_code=config.model.trust_remote_code)
    return None


def _role_models(config: RunConfig) -> dict[str, ModelFacts]:
    roles = algorithm_of(config).roles()
    return {name: _facts_of(config, spec.path) for name, spec in roles.items() if spec.path}


def _facts_of(config: RunConfig, path: str) -> ModelFacts:
    trust = config.model.trust_remote_code
    return model_facts(shape_of(path, trust_remote_code=trust), trust_remote_code=trust)


def _loads_whole(config: RunConfig) -> bool:
    if not config.model.path or config.model.random_init:
        return False
    return next(Path(config.model.path).glob("*.safetensors"), None) is None


def _refused_value(error: Exception, config: RunConfig) -> Refusal:
    """Return what an error of the task or the model says, under the setting it names if it names one, or a file of it."""
    said = str(error).splitlines()[0]
    setting, mark, reason = said.partition(": ")
    if not mark or not setting.startswith(("task.", "model.")) or " " in setting:
        task = config.task
        of_file = [
            f"task.{name}"
            for name in ROW_FILES
            if isinstance(task, RowsConfig) and said.startswith(task.paths(name))
        ]
        of_task = of_file[0] if of_file else "task"
        setting, reason = of_task if isinstance(error, TaskError) else "model.path", said
    return Refusal(setting, reason.rstrip("."), "")


def _task(config: RunConfig, *, opens: bool) -> tuple[int, int, int, list[Refusal]]:
    """Return how many training prompts there are, the longest prompt and the longest right answer in tokens, and rows that are too long."""
    makes_model = isinstance(config.task, CharTaskConfig)
    if not opens and not makes_model:
        return 0, config.task.max_prompt_tokens if isinstance(config.task, PromptConfig) else 0, 0, []
    task = make_task(
        config.task, config.model.path, config.seed, trust_remote_code=config.model.trust_remote_code
    )
    if makes_model and config.model.path:  # nothing is made then: its tokens are compared
        task.model_folder(Path(config.model.path), config.seed)
    refused = [] if makes_model else list(length_refusals(config, task))
    if config.trainer.epochs and not hasattr(task, "num_train_prompts"):
        refused.append(Refusal("trainer.epochs", "the task has no number of prompts", "give trainer.steps"))
    found = (
        getattr(task, "num_train_prompts", 0),
        task.max_prompt_tokens,
        getattr(task, "max_answer_tokens", 0),
    )
    return *found, refused
