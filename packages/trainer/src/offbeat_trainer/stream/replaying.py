"""Generation that follows a recorded schedule: the same tokens under the same weights, whatever the timing."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from offbeat_rollout import Finish
from offbeat_trainer.data.types import Group
from offbeat_trainer.errors import TrainerError
from offbeat_trainer.stream.parts import training_params
from offbeat_trainer.stream.producer import GENERATION, Producer

if TYPE_CHECKING:
    from offbeat_rollout import Completion
    from offbeat_trainer.stream.buffer import GroupBuffer
    from offbeat_trainer.stream.journal.events import Recovered, Spans
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
        buffer.replaying = True
        buffer.script |= {step: indices for step, indices in schedule.taken.items() if step >= buffer.step}
        taken = {index for step, indices in buffer.script.items() if step >= buffer.step for index in indices}
        self._indices = sorted(taken - set(recovered.finished))
        for index in self._indices:
            self._left.update(schedule.versions(index))

    def start(self) -> None:
        """Begin all groups: each waits for its own versions."""
        for index in self._indices:
            self._spawn(f"replay {index}", self._replay(index))

    async def drained(self, version: int) -> None:
        """Wait until everything is made that `version` made."""
        await self._buffer.until(lambda: self._left[version] == 0)

    async def _replay(self, index: int) -> None:
        parts, buffer, schedule = self._parts, self._buffer, self._schedule
        prompt = self.prompt(index)
        params = training_params(parts, self._prompts.step_of(index))
        begun: tuple[Completion, ...] = ()
        for version in schedule.versions(index):
            await buffer.until(lambda version=version: buffer.served >= version)
            if buffer.served > version:
                raise TrainerError(
                    f"group {index} needs version {version}, and {buffer.served} is served already"
                )
            if not begun:
                buffer.issue(index, prompt.uid, schedule.begun[index])
            group = await parts.generator.complete(prompt, params, parts.loop.group_size, begun=begun)
            begun = tuple(
                _cut(one, spans, version)
                for one, spans in zip(group.completions, schedule.spans[index], strict=True)
            )
            self._left[version] -= 1
            if not self._left[version]:
                buffer.touch()
        buffer.finish(index, await parts.scorer.score(Group(prompt=prompt, completions=begun)))
        parts.watchdog.progress(GENERATION, f"replayed group {index}")


def _cut(completion: Completion, spans: Spans, version: int) -> Completion:
    """Return what of `completion` was made by `version` and those before it.

    Raises:
        TrainerError: there is not as much as the schedule says: this is not the same run.
    """
    count = sum(num_tokens for made_by, num_tokens in spans if made_by <= version)
    more_comes = any(made_by > version for made_by, _ in spans)
    have = completion.num_tokens
    if have < count or (not more_comes and have != count):
        raise TrainerError(
            f"{completion.request_id}: the schedule has {count} tokens up to version {version}, now there are {have}; "
            "settings, task, model and seed must be those of the recorded run, and the engine must be deterministic"
        )
    return completion.cut(count, Finish.ABORT if more_comes else completion.finish)
