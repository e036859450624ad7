"""A checkpoint of a run as a Hugging Face folder, read by one training rank on the CPU: no Ray, no replicas, no GPU."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat_engine import World, engine_class, engine_config_class
from offbeat_engine.config import EngineConfig, LoraExport
from offbeat_recipes.errors import RunFolderError
from offbeat_recipes.run.folder import CONFIG, SUMMARY
from offbeat_recipes.settings.reading import to_dict

if TYPE_CHECKING:
    from offbeat_recipes.settings.tree import RunConfig

CARD = "README.md"
_FIGURES = ("accuracy_before", "accuracy_after", "reward_first", "reward_last", "loss_before", "loss_after")


def export_checkpoint(
    run: Path,
    config: RunConfig,
    target: Path | None = None,
    *,
    step: int | None = None,
    lora: LoraExport | None = None,
) -> Path:
    """Write the checkpoint of `step` of `run`, by default the newest whole one, as a model; return the folder.

    That is `target`, by default `exports/step_<n>` of the run.

    Beside the model lies a card that says how it was trained. `lora`: what is written of a model with adapters, all of it with the
    adapters merged in, or those alone as a folder that peft loads over the base; by default what the run's settings say.

    Raises:
        RunFolderError: there is no such checkpoint.
        EngineError: it cannot be read, or the folder cannot be written.
    """
    checkpoints, start = _checkpoints(run)
    engine = engine_class("fsdp2")(_engine_config(config, start or config.model.path, lora), World())
    try:
        engine.init_model()
        found = engine.load_checkpoint(str(checkpoints), global_step=step)
        if found is None:
            raise RunFolderError(
                f"{run} has no whole checkpoint: trainer.save_every says how often a run writes one"
            )
        target = run / "exports" / f"step_{found}" if target is None else target
        engine.export_huggingface(str(target.absolute()))
    finally:
        engine.close()
    (target / CARD).write_text(_card(run, config, found), encoding="utf-8")
    return target


def require_push(repository: str) -> None:
    """Look, before anything is exported, whether `push` could begin.

    Raises:
        RunFolderError: the name is none of the hub, or nobody is logged in here.
    """
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise RunFolderError(f"--push: expected OWNER/NAME, got {repository!r}: {error}") from error
    if not huggingface_hub.get_token():
        raise RunFolderError(
            "--push: no token of the Hugging Face hub here; `hf auth login`, or set HF_TOKEN"
        )


def push(folder: Path, repository: str) -> str:
    """Upload an exported `folder` to `repository`, OWNER/NAME on the Hugging Face hub, made private where it is new; return its address.

    Raises:
        RunFolderError: the hub refused it or was not reached; the folder stays.
    """
    import huggingface_hub

    hub = huggingface_hub.HfApi()
    try:
        made = hub.create_repo(repository, private=True, exist_ok=True)
        hub.upload_folder(
            repo_id=made.repo_id, folder_path=folder, commit_message=f"{folder.name}, exported by Offbeat"
        )
    except Exception as error:  # those of the network come as the client's library has them
        raise RunFolderError(
            f"--push: {repository}: {error}; the model is in {folder}: `hf upload {repository} {folder}` tries again"
        ) from error
    return str(made)


def _checkpoints(run: Path) -> tuple[Path, str]:
    """Return where the policy's checkpoints are and the folder of the model that they began with; "" for that of the settings."""
    for folder, starts in (("policy", ("model", "base")), ("sft/policy", ("base",))):
        if (run / "checkpoints" / folder).exists():
            made = [str(run / name) for name in starts if (run / name / "config.json").exists()]
            return (run / "checkpoints" / folder), (made or [""])[0]
    raise RunFolderError(f"{run} has no checkpoints; {run / 'final'} may hold the model that it ended with")


def _engine_config(config: RunConfig, path: str, lora: LoraExport | None) -> EngineConfig:
    """Return the settings of one FSDP2 rank on the CPU for the run's model; it reads the checkpoints of every engine of ours."""
    run_engine = config.engine_config(path)
    common = {item.name: getattr(run_engine, item.name) for item in fields(EngineConfig)}
    engine = engine_config_class("fsdp2")(**common)
    return replace(
        engine,
        device="cpu",
        offload_parameters=False,
        offload_optimizer=False,
        model=replace(engine.model, path=path, random_init=False),
        lora=engine.lora if lora is None else replace(engine.lora, export=lora),
    )


def _name_of(path: str) -> str:
    """Return the name of the model in `path` for people elsewhere: the hub's, with its commit, or that of the folder."""
    cached = [part for part in Path(path).parts if part.startswith("models--")]
    if cached:
        return f"{cached[-1].removeprefix('models--').replace('--', '/', 1)} (commit {Path(path).name})"
    return Path(path).name if Path(path).is_absolute() else path


def _card(run: Path, config: RunConfig, step: int) -> str:
    """Return the model card: from what, by what and how far it was trained, and what was measured."""
    summary = run / SUMMARY
    summary_values: dict[str, Any] = (
        json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else {}
    )
    figures = [
        f"| {key.replace('_', ' ')} | {summary_values[key]:.4g} |"
        for key in _FIGURES
        if summary_values.get(key) is not None
    ]
    base = _name_of(config.model.path) or "a model made by the run"
    settings = json.dumps(to_dict(config)["trainer"], indent=2)
    measured = [
        "",
        "Measured by the run, on held-out prompts where the name says so:",
        "",
        "| | |",
        "|---|---|",
        *figures,
    ]
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            f"tags: [offbeat, {config.algorithm.name.rpartition(':')[2]}]",
            "---",
            f"# {config.name}, step {step}",
            "",
            f"Trained by Offbeat with `algorithm={config.algorithm.name}` on "
            f"`task={config.task.name}`, mode `{config.mode.name}`, from {base}.",
            *(measured if figures else []),
            "",
            f"`trainer.*`, all other settings are in the run's {CONFIG}:",
            "",
            "```json",
            settings,
            "```",
            "",
        ]
    )
