"""Generation that follows a recorded schedule: the same tokens under the same weights, whatever the timing."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from offbeat_rollout import Finish
from offbeat_trainer.data.types import Group, oldest_version
from offbeat_trainer.errors import TrainerError
from offbeat_trainer.rollouts.single import SingleTurn
from offbeat_trainer.stream.journal.events import Half
from offbeat_trainer.stream.producer import Producer, training_params
from offbeat_trainer.watch.timeline import GENERATION

if TYPE_CHECKING:
    from offbeat_rollout import SamplingParams
    from offbeat_trainer.data.types import Prompt, Spans, Trajectory
    from offbeat_trainer.stream.buffer import GroupBuffer
    from offbeat_trainer.stream.journal.events import Recovered
    from offbeat_trainer.stream.parts import Parts
    from offbeat_trainer.stream.schedule import Schedule


class Replayer(Producer):
    """A producer whose every decision was made before.

    A completion that several versions made is made again in pieces: under each version it is generated to its end and
    cut where the next version took over. Seeds of continuations depend on the cut, so the pieces are the same.
    """

    def __init__(self, parts: Parts, buffer: GroupBuffer, recovered: Recovered, schedule: Schedule) -> None:
        """Follow `schedule`, from the step that `buffer` is at."""
        super().__init__(parts, buffer, recovered, max_attempts=1)
        self._schedule = schedule
        self._left: Counter[int] = Counter()  # pieces to be made, by version
        taken = {index for step, indices in buffer.script.items() if step >= buffer.step for index in indices}
        self._indices = sorted(taken - set(recovered.finished))
        for index in self._indices:
            self._left.update(self._versions(index))

    def start(self) -> None:
        """Begin all groups: each waits for its own versions."""
        for index in self._indices:
            self._spawn(f"replay {index}", self._replay(index))

    async def drained(self, version: int) -> None:
        """See `Producer.drained`."""
        await self._buffer.until(lambda: self._left[version] == 0)

    async def _replay(self, index: int) -> None:
        parts, buffer, schedule = self._parts, self._buffer, self._schedule
        prompt = self.prompt(index)
        params = training_params(parts, self._prompts.step_of(index))
        begun = self._halves.get(index, ())
        made = Group(prompt=prompt, trajectories=())
        issued = False
        for version in self._versions(index):
            await buffer.until(lambda version=version: buffer.served >= version)
            if buffer.served > version:
                raise TrainerError(
                    f"group {index} needs version {version}, and {buffer.served} is served already"
                )
            if not issued:
                buffer.issue(index, prompt.uid, schedule.begun[index])
                issued = True
            made = await self._make_again(index, prompt, params, begun)
            begun = tuple(
                _cut(one, spans, version)
                for one, spans in zip(made.trajectories, schedule.spans[index], strict=True)
            )
            if any(one.finish is Finish.ABORT for one in begun):
                parts.journal.write(Half(index=index, trajectories=begun))
            self._left[version] -= 1
            if not self._left[version]:
                buffer.touch()
        whole = Group(prompt=prompt, trajectories=begun)
        rollout = parts.rollout
        buffer.finish(index, await rollout.score(whole) if isinstance(rollout, SingleTurn) else made)
        parts.watchdog.progress(GENERATION, f"replayed group {index}")

    def _versions(self, index: int) -> list[int]:
        """Return the versions that are still to make tokens of a group, of which an earlier process may have left some."""
        versions, half = self._schedule.versions(index), self._halves.get(index, ())
        made = oldest_version(half) and max(span.version for one in half for span in one.spans)
        return [version for version in versions if not made or version > made]

    async def _make_again(
        self, index: int, prompt: Prompt, params: SamplingParams, begun: tuple[Trajectory, ...]
    ) -> Group:
        """Return the group as the version served now makes it from what others began."""
        rollout, size = self._parts.rollout, self._parts.loop.group_size
        if isinstance(rollout, SingleTurn):
            return await rollout.generator.complete(prompt, params, size, begun=begun)
        assert len(self._schedule.versions(index)) == 1  # `Schedule.obstacle` sees to it
        return await rollout.run(prompt, params, size)


def _cut(whole: Trajectory, spans: Spans, version: int) -> Trajectory:
    """Return what of `whole` was made by `version` and those before it.

    Raises:
        TrainerError: there is not as much as the schedule says: this is not the same run.
    """
    count = sum(num_tokens for made_by, num_tokens in spans if made_by <= version)
    more_comes = any(made_by > version for made_by, _ in spans)
    have = whole.num_trained
    if have < count or (not more_comes and have != count):
        name = whole.turns[0].completion.request_id if whole.turns else "a trajectory without turns"
        raise TrainerError(
            f"{name}: the schedule has {count} tokens up to version {version}, now there are {have}; "
            "settings, task, model and seed must be those of the recorded run, and the engine must be deterministic"
        )
    return whole.cut(count, Finish.ABORT) if more_comes or count < have else whole
