"""`offbeat-eval`: how good a run's policy is on held-out prompts, with the run's own parts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from offbeat_recipes.errors import TaskError
from offbeat_recipes.run.folder import SUMMARY
from offbeat_recipes.run.modes import cluster_spec, engine_on, make_rollout
from offbeat_rollout import SamplingParams
from offbeat_trainer.algorithms.roles import POLICY
from offbeat_trainer.cluster.cluster import Cluster
from offbeat_trainer.config import Placement
from offbeat_trainer.data.assemble import accuracy
from offbeat_trainer.data.metrics import reduce_metrics
from offbeat_trainer.errors import ResumeError
from offbeat_trainer.rollouts.single import derive_seed

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat_recipes.run.session import Session
    from offbeat_trainer.data.types import Group


async def evaluate_run(session: Session) -> None:
    """Sample held-out prompts from the model that `evaluation.step` names; write and report what came out."""
    config = session.config
    start = session.folder.model if session.folder.model.exists() else session.base_model
    serves_alone, step = config.evaluation.step == 0, 0
    if config.evaluation.step < 0 and _is_supervised_alone(session):
        serves_alone = True
    elif config.evaluation.step < 0 and (exported := _exported_since(session)) is not None:
        serves_alone, start, step = True, session.folder.final, exported
    checkpoints = session.folder.checkpoints
    if not (checkpoints / "policy").exists() and (checkpoints / "sft").exists() and not serves_alone:
        start, checkpoints = session.base_model, checkpoints / "sft"  # of `offbeat-sft`, which began there
    spec = cluster_spec(config, session.folder, str(start.absolute()))
    spec = replace(spec, train=replace(spec.train, checkpoint_dir=str(checkpoints.absolute())))
    if serves_alone:  # nobody is there to share devices with
        spec = replace(spec, cluster=replace(spec.cluster, placement=Placement.SEPARATE))
    cluster = Cluster(spec)
    try:
        if serves_alone:
            await cluster.rollout.start()
            cluster.rollout.admit_all(0)
        else:
            step = await _load_and_publish(session, cluster, start)
        groups = await _sample(session, cluster)
    finally:
        await cluster.stop()
    _report(session, step, groups)


def _is_supervised_alone(session: Session) -> bool:
    """Say whether the newest model of a run is the one that supervised training left: nothing came after it."""
    folder, config = session.folder, session.config
    later = (folder.checkpoints / "policy").exists() or folder.final.exists()
    return folder.model.exists() and not later and not config.sends_adapter_alone


def _exported_since(session: Session) -> int | None:
    """Return the step of the model that a run exported at its end, where no checkpoint is as new (trainer.save_every=0)."""
    folder, config = session.folder, session.config
    if config.sends_adapter_alone or not folder.final.exists():
        return None
    names = [path.name.removeprefix("step_") for path in (folder.checkpoints / "policy").glob("step_*")]
    saved = [int(name) for name in names if name.isdigit()]
    if not saved:
        return config.trainer.steps
    ended: dict[str, Any] = (
        json.loads((folder.path / SUMMARY).read_text()) if (folder.path / SUMMARY).exists() else {}
    )
    whole = (
        ended.get("interrupted") is False and "error" not in ended
    )  # else it is the model of an end before that
    return ended["steps"] if whole and ended["steps"] > max(saved) else None


async def _load_and_publish(session: Session, cluster: Cluster, start: Path) -> int:
    wanted = None if session.config.evaluation.step < 0 else session.config.evaluation.step

    async def prepare() -> int:
        await cluster.train.build({POLICY: engine_on(session.config, start)})
        step = await cluster.train.load(wanted)
        if step is None:
            raise ResumeError(
                f"{session.folder.path} has no whole checkpoint; evaluation.step=0 evaluates the model it started from"
            )
        return step

    step = await cluster.start(prepare)
    await cluster.publisher().publish(1)
    return step


async def _sample(session: Session, cluster: Cluster) -> list[Group]:
    config, task = session.config, session.task
    prompts = task.validation_prompts(config.trainer.validation_prompts)
    if not prompts:
        raise TaskError(
            "no prompts are held out (trainer.validation_prompts=0, or the task has none): nothing can be evaluated"
        )
    session.reporter.phase("validate", f"{len(prompts)} held-out prompts")
    sampling = SamplingParams(
        max_tokens=config.sampling.max_tokens,
        temperature=config.evaluation.temperature,
        stop_token_ids=task.stop_token_ids(),
        stop=config.sampling.stop,
        seed=derive_seed(config.seed, "evaluate"),
    )
    rollout = make_rollout(session, cluster)
    try:
        return await rollout.run_all(prompts, sampling, config.evaluation.num_samples)
    finally:
        await rollout.close()


def _report(session: Session, step: int, groups: list[Group]) -> None:
    scores = [score for group in groups for score in group.scores]
    result = {
        "step": step,
        "prompts": len(groups),
        "samples_per_prompt": len(groups[0].scores),
        "temperature": session.config.evaluation.temperature,
        **reduce_metrics(accuracy("accuracy", scores)),
        "reward": sum(score.reward for score in scores) / len(scores),
    }
    if "accuracy" in result:
        solved = sum(any(score.correct for score in group.scores) for group in groups)
        result["solved_at_least_once"] = solved / len(groups)
    folder = session.folder.path / "evaluations"
    folder.mkdir(exist_ok=True)
    (folder / f"step_{step}.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    texts = [
        [session.task.decode(one.token_ids.tolist()) for one in group.trajectories] for group in groups[:4]
    ]
    session.reporter.samples(step, "evaluated", groups[:4], texts)
    lines = {name.replace("_", " "): f"{value:.4g}" for name, value in result.items()}
    written = {"written to": str(folder / f"step_{step}.json")}
    session.reporter.summary({"results": lines, "paths": written})
