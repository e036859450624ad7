"""Where a run begins: with step 0, or with what its newest whole checkpoint holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat_trainer import ResumeError
from offbeat_trainer.watch.reporters.fanout import Truncating

if TYPE_CHECKING:
    from offbeat_recipes.run.session import Session
    from offbeat_trainer.cluster.train_group import TrainGroup
    from offbeat_trainer.run_store import RunStore


async def first_step(
    session: Session, train: TrainGroup, store: RunStore, *, steps: int, setting: str
) -> int:
    """Return the first step to be done, of `steps`, whose `setting` that is; the ranks hold its weights then.

    Raises:
        ResumeError: more steps are done already.
    """
    step = await train.load(None) if session.folder.resumed else None
    if step is not None and step > steps:
        raise ResumeError(f"{session.folder.path} has {step} steps already; {setting}={steps} is less")
    # Without a checkpoint all is said again, but what `offbeat-sft` said in this folder before reinforcement learning began.
    again = session.folder.resumed and (
        step is not None or setting == "warmup.steps" or not _supervised(session)
    )
    if again and isinstance(session.reporter, Truncating):
        session.reporter.truncate_after(-1 if step is None else step)
    if step is None:
        return 0
    session.outcome.go_on(store.load(step))
    session.reporter.phase("resume", f"from the checkpoint of step {step}")
    return step


def _supervised(session: Session) -> bool:
    return (session.folder.checkpoints / "sft").exists()
