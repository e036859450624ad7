"""The algorithm of a run: made of its settings, asked for its models, and tried before anything starts."""

from __future__ import annotations

import traceback
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat_engine.config import Feature, Refusal
from offbeat_engine.interface import engine_class
from offbeat_recipes.settings.hub import absent_model
from offbeat_rollout.toolkit.registry import adapter_class
from offbeat_rollout.types import RolloutFeature
from offbeat_trainer.algorithms.registry import algorithm_class

if TYPE_CHECKING:
    from offbeat_engine import EngineConfig
    from offbeat_recipes.settings.tree import RunConfig
    from offbeat_trainer import Algorithm
    from offbeat_trainer.config import AlgorithmConfig


def offloads(config: RunConfig) -> bool:
    """Whether the training engine can wait in host memory between its updates."""
    return Feature.OFFLOAD in engine_class(config.engine.name).capabilities().features


def infers_alone(config: RunConfig) -> bool:
    """Whether the training engine can hold a model that is never trained without what training needs."""
    return Feature.INFERENCE_ONLY in engine_class(config.engine.name).capabilities().features


def recomputes(config: RunConfig) -> bool:
    """Whether a replica can compute keys and values of what it has under way again."""
    return RolloutFeature.RECOMPUTE_KV in adapter_class(config.rollout.name).capabilities().features


def sleeps(config: RunConfig) -> bool:
    """Whether a resting replica gives the memory of its device back."""
    return config.device in adapter_class(config.rollout.name).capabilities().sleep_devices


def algorithm_of(config: RunConfig) -> Algorithm[AlgorithmConfig]:
    """Return the algorithm that the settings name."""
    from offbeat_trainer import StepShape

    algorithm = algorithm_class(config.algorithm.name)
    told = {item.name: getattr(config.algorithm, item.name) for item in fields(algorithm.Config)}
    return algorithm(
        config=algorithm.Config(**told),
        step=StepShape(
            group_size=config.trainer.group_size,
            updates_per_step=config.trainer.updates_per_step,
            max_completion_tokens=config.max_new_tokens,
        ),
    )


def engines_of(config: RunConfig, policy: EngineConfig) -> dict[str, EngineConfig | None]:
    """Return what the engine of each role is told, where the policy's is told `policy`; see `role_engines`."""
    from offbeat_trainer.algorithms.roles import role_engines

    return role_engines(
        algorithm_of(config).roles(), policy, infers_alone=infers_alone(config), generates=config.generates
    )


def algorithm_refusals(config: RunConfig) -> tuple[list[Refusal], bool]:
    """Return what a trial of the algorithm on made-up groups finds wrong with it; nothing where its settings are refused.

    Then, whether it learns by the sampler's log-probs; see `trial`.
    """
    from offbeat_trainer.algorithms.roles import POLICY
    from offbeat_trainer.algorithms.trial import trial
    from offbeat_trainer.data.loading import own_place

    algorithm = algorithm_of(config)
    try:
        if algorithm.check():
            return [], True  # the plan says so
        folders = {name: spec.path for name, spec in algorithm.roles().items() if spec.path}
        if lacking := [name for name, path in folders.items() if not (Path(path) / "config.json").is_file()]:
            return [_no_folder(name, folders[name]) for name in lacking], True
        if any(spec.names_tokens for spec in algorithm.roles().values()) and (
            why := _names_no_tokens(config)
        ):
            return [
                Refusal(
                    "engine",
                    why,
                    "engine=fsdp2 without parallel parts of a model, or an algorithm that needs none of them: "
                    "algorithm.divergence=sampled, algorithm.advantage=opo, algorithm.kl_estimator=k3",
                )
            ], True
        engines = engines_of(config, config.engine_config(config.model.path))
        reads_sampler = trial(algorithm)
    except Exception as error:  # noqa: BLE001 whatever a user's algorithm raises
        place = own_place("".join(traceback.format_exception(error)))
        reason = f"{config.algorithm.name} failed a trial: {type(error).__name__}: {error}"
        reason += f" (at {place})" if place else ""
        return [Refusal("algorithm", reason, "mend it, or choose another")], True
    specs = algorithm.roles()
    refused = [
        Refusal("algorithm", f"its {name}: {found.setting}: {found.reason}", found.remedy)
        for name, told in engines.items()
        if name != POLICY and told is not None  # the policy's engine is asked by itself
        for found in engine_class(specs[name].engine or config.engine.name).check(
            told, config.engine.num_ranks
        )
    ]
    features = engine_class(config.engine.name).capabilities().features
    if getattr(config.algorithm, "reference_every", 0) and Feature.TAKE_WEIGHTS not in features:
        reason = f"engine={config.engine.name} does not take another engine's weights over"
        refused.append(Refusal("algorithm.reference_every", reason, "engine=fsdp2, or leave it out"))
    return refused, reads_sampler


def _names_no_tokens(config: RunConfig) -> str:
    """Return why the training engine does not name the likeliest tokens of a distribution, or nothing."""
    known = engine_class(config.engine.name).capabilities()
    if Feature.TOP_TOKENS not in known.features:
        return known.missing.get(
            Feature.TOP_TOKENS, "it does not name the likeliest tokens of a distribution"
        )
    return (
        "ranks that share a sequence do not name likeliest tokens"
        if config.engine.model_parallel_size > 1
        else ""
    )


def _no_folder(name: str, path: str) -> Refusal:
    reason, remedy = absent_model(path)
    return Refusal("algorithm", f"its {name}: {reason}", remedy)
