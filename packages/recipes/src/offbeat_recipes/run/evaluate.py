"""`offbeat eval`: how good a run's policy is on held-out prompts, with the run's own parts."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from math import comb
from typing import TYPE_CHECKING, Any

from offbeat_recipes.errors import TaskError
from offbeat_recipes.run.folder import SUMMARY
from offbeat_recipes.run.modes import cluster_spec, engine_on, make_rollout
from offbeat_recipes.tasks.base import Votes
from offbeat_rollout import SamplingParams
from offbeat_trainer.algorithms.roles import POLICY
from offbeat_trainer.cluster.cluster import Cluster
from offbeat_trainer.config import Placement
from offbeat_trainer.data.assemble import accuracy
from offbeat_trainer.data.metrics import reduce_metrics
from offbeat_trainer.errors import ResumeError
from offbeat_trainer.loops.outcome import held_out_sets
from offbeat_trainer.rollouts.single import derive_seed, run_all
from offbeat_trainer.watch.fanout import progress_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from pathlib import Path

    from offbeat_recipes.run.context import RunContext
    from offbeat_recipes.tasks.base import RunnableTask
    from offbeat_trainer.data.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What is looked at: `num_samples` completions a prompt at `temperature` (0 is greedy).

    `step` is a checkpoint of the run folder: -1 the newest, or the exported model where none is as new, 0 the model as it is.
    """

    step: int = -1
    num_samples: int = 1
    temperature: float = 0.0


async def evaluate_run(asked: Evaluation, context: RunContext) -> None:
    """Sample held-out prompts from the model of the step that is asked for; write and report what came out."""
    config = context.config
    start = context.folder.model if context.folder.model.exists() else context.base_model
    serves_alone, step = asked.step == 0, 0
    if asked.step < 0 and _is_supervised_alone(context):
        serves_alone = True
    elif asked.step < 0 and (exported := _exported_since(context)) is not None:
        serves_alone, start, step = True, context.folder.final, exported
    checkpoints = context.folder.checkpoints
    if not (checkpoints / "policy").exists() and (checkpoints / "sft").exists() and not serves_alone:
        start, checkpoints = context.base_model, checkpoints / "sft"  # of `offbeat sft`, which began there
    spec = cluster_spec(config, context.folder, str(start.absolute()))
    spec = replace(spec, train=replace(spec.train, checkpoint_dir=str(checkpoints.absolute())))
    if serves_alone:  # nobody is there to share devices with
        spec = replace(spec, cluster=replace(spec.cluster, placement=Placement.SEPARATE))
    cluster = Cluster(spec)
    try:
        if serves_alone:
            await cluster.rollout.start()
            cluster.rollout.admit_all(0)
        else:
            step = await _load_and_publish(asked, context, cluster, start)
        groups = await _sample(asked, context, cluster)
    finally:
        await cluster.stop()
    _report(replace(asked, step=step), context, groups)


def _is_supervised_alone(context: RunContext) -> bool:
    """Say whether the newest model of a run is the one that supervised training left: nothing came after it."""
    folder, config = context.folder, context.config
    later = (folder.checkpoints / "policy").exists() or folder.final.exists()
    return folder.model.exists() and not later and not config.sends_adapter_alone


def _exported_since(context: RunContext) -> int | None:
    """Return the step of the model that a run exported at its end, where no checkpoint is as new (trainer.save_every=0)."""
    folder, config = context.folder, context.config
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


async def _load_and_publish(asked: Evaluation, context: RunContext, cluster: Cluster, start: Path) -> int:
    wanted = None if asked.step < 0 else asked.step

    async def prepare() -> int:
        await cluster.train.build({POLICY: engine_on(context.config, start)})
        step = await cluster.train.load(wanted)
        if step is None:
            raise ResumeError(
                f"{context.folder.path} has no whole checkpoint; --step 0 evaluates the model it started from"
            )
        return step

    step = await cluster.start(prepare)
    await cluster.publisher().publish(1)
    return step


async def _sample(asked: Evaluation, context: RunContext, cluster: Cluster) -> list[Group]:
    config, task = context.config, context.task
    prompts = task.validation_prompts(config.trainer.validation_prompts)
    if not prompts:
        raise TaskError(
            "no prompts are held out (trainer.validation_prompts=0, or the task has none): nothing can be evaluated"
        )
    context.reporter.phase("validate", f"{len(prompts)} held-out prompts")
    sampling = SamplingParams(
        max_tokens=config.sampling.max_tokens,
        temperature=asked.temperature,
        stop_token_ids=task.stop_token_ids(),
        stop=config.sampling.stop,
        seed=derive_seed(config.seed, "evaluate"),
    )
    rollout = make_rollout(context, cluster)
    try:
        progress = progress_of(context.reporter)
        return await run_all(rollout, prompts, sampling, asked.num_samples, progress)
    finally:
        await rollout.close()


def pass_at_k(verdicts: Sequence[Sequence[bool]]) -> dict[str, float]:
    """Return the chance that one of k samples is right, in the mean over prompts, for k = 1, 2, 4, ... and all that each has.

    With c of n right it is 1 - C(n - c, k) / C(n, k), which has no bias (arXiv 2107.03374, section 2.1).
    """
    most = min(map(len, verdicts))
    ks = [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]
    return {
        f"pass_at_{k}": sum(1 - comb(len(one) - sum(one), k) / comb(len(one), k) for one in verdicts)
        / len(verdicts)
        for k in ks
    }


def majority(votes: Sequence[Sequence[Hashable]], verdicts: Sequence[Sequence[bool]]) -> float:
    """Return how often the answer that most samples of a prompt give is right (self-consistency, arXiv 2203.11171).

    None is no vote; where answers have equally many the one that was given first counts.
    """
    right = 0
    for given, verdict in zip(votes, verdicts, strict=True):
        answers = Counter(vote for vote in given if vote is not None)
        right += bool(answers) and verdict[given.index(answers.most_common(1)[0][0])]
    return right / len(votes)


def _votes(task: RunnableTask, groups: Sequence[Group]) -> list[list[Hashable]]:
    vote: Callable[[str], Hashable] = task.vote if isinstance(task, Votes) else str.strip
    return [[vote(task.decode(one.token_ids.tolist())) for one in group.trajectories] for group in groups]


def _report(asked: Evaluation, context: RunContext, groups: list[Group]) -> None:
    step = asked.step
    scores = [score for group in groups for score in group.scores]
    result = {
        "step": step,
        "prompts": len(groups),
        "samples_per_prompt": len(groups[0].scores),
        "temperature": asked.temperature,
        **reduce_metrics(accuracy("accuracy", scores)),
        "reward": sum(score.reward for score in scores) / len(scores),
    }
    for name, of_set in held_out_sets(groups).items():
        result |= reduce_metrics(accuracy(f"accuracy_{name}", of_set))
        result[f"reward_{name}"] = sum(score.reward for score in of_set) / len(of_set)
    if "accuracy" in result:
        verdicts = [[bool(score.correct) for score in group.scores] for group in groups]
        result |= pass_at_k(verdicts)
        if (most := max(map(len, verdicts))) > 1:
            result[f"maj_at_{most}"] = majority(_votes(context.task, groups), verdicts)
    folder = context.folder.path / "evaluations"
    folder.mkdir(exist_ok=True)
    (folder / f"step_{step}.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    texts = [
        [context.task.decode(one.token_ids.tolist()) for one in group.trajectories] for group in groups[:4]
    ]
    context.reporter.samples(step, "evaluated", groups[:4], texts)
    lines = {name.replace("_", " "): f"{value:.4g}" for name, value in result.items()}
    written = {"written to": str(folder / f"step_{step}.json")}
    context.reporter.summary({"results": lines, "paths": written})
