"""A generator that takes time and no CPU, and what else the parts of `modes.py` have in common."""

from __future__ import annotations

import asyncio
import bisect
import heapq
import math
import pickle
import random
import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from offbeat_rollout import Completion, Finish, version_spans
from offbeat_trainer.data.types import Prompt, Score
from offbeat_trainer.loops.events import Finished, Taken
from offbeat_trainer.watch.watchdog import now_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from offbeat_rollout import GenerateRequest
    from offbeat_trainer.data.metrics import Metric
    from offbeat_trainer.data.types import Group, Trajectory
    from offbeat_trainer.loops.events import Event, Journal

VOCAB = 64
PROMPT_TOKENS = 8
TABLE = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Log-normal numbers of tokens: exp(ln(median) + sigma * z), in 1 .. longest. The tail is heavy."""

    median: float
    sigma: float
    longest: int

    @cached_property
    def table(self) -> tuple[int, ...]:
        """Many draws; a request takes the one that its seed points at, so that drawing costs nothing."""
        dice = random.Random(0)
        draws = (self.median * math.exp(self.sigma * dice.gauss()) for _ in range(TABLE))
        return tuple(max(1, min(self.longest, round(one))) for one in draws)

    def mean(self) -> float:
        """Return the mean of the draws."""
        return sum(self.table) / TABLE


class PacedReplica:
    """Makes completions of drawn lengths, `token_s` seconds a token, on `slots` slots, first come, first served.

    A slot's next completion begins when its last one was due to end: what the driver is late is not charged to
    generation, as it would not be with an engine of its own process. Weights change without a pause; tokens made from
    then on are of the new version.
    """

    def __init__(self, lengths: Lengths, token_s: float, slots: int, *, pickles: bool = False) -> None:
        """Serve version 0. With `pickles` answers come as bytes, as from another process; to read them is not own CPU."""
        self.token_s = token_s
        self._pickles = pickles
        self._lengths = lengths
        self._free_s = [0.0] * slots
        dice = random.Random(1)
        self._tokens = np.array([dice.randrange(VOCAB) for _ in range(2 * lengths.longest)], np.int32)
        self._logprobs = np.full(lengths.longest, -math.log(VOCAB), np.float32)
        self._flips_s = [0.0]
        self._served = [0]
        self.own_s = 0.0  # of CPU: what pretending costs, which is not the driver's
        self.busy: list[tuple[float, float]] = []  # when slots worked, by completion

    def flip(self, version: int) -> None:
        """Serve `version` from now on."""
        self._flips_s.append(now_s())
        self._served.append(version)

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Return the completions of `requests` when the last of them is due."""
        began_s = time.thread_time()
        table = self._lengths.table
        due: list[tuple[float, float, int]] = []
        for request in requests:
            assert request.sampling.seed is not None
            length = min(table[request.sampling.seed % TABLE], request.sampling.max_tokens)
            start_s = max(now_s(), self._free_s[0])
            end_s = start_s + length * self.token_s
            heapq.heapreplace(self._free_s, end_s)
            self.busy.append((start_s, end_s))
            due.append((start_s, end_s, length))
        self.own_s += time.thread_time() - began_s
        await asyncio.sleep(max(end_s for _, end_s, _ in due) - now_s())
        began_s = time.thread_time()
        made = [
            self._completion(request, start_s, length)
            for request, (start_s, _, length) in zip(requests, due, strict=True)
        ]
        message = pickle.dumps(made, pickle.HIGHEST_PROTOCOL) if self._pickles else None
        self.own_s += time.thread_time() - began_s
        return made if message is None else pickle.loads(message)

    def busy_s(self, from_s: float, to_s: float) -> float:
        """Return how long the slots worked between two moments, added up."""
        return sum(max(0.0, min(end_s, to_s) - max(start_s, from_s)) for start_s, end_s in self.busy)

    def _completion(self, request: GenerateRequest, start_s: float, length: int) -> Completion:
        assert request.sampling.seed is not None
        first = request.sampling.seed % self._lengths.longest
        return Completion(
            request_id=request.request_id,
            token_ids=self._tokens[first : first + length],
            logprobs=self._logprobs[:length],
            spans=version_spans(self._runs(start_s, length)),
            finish=Finish.LENGTH,
        )

    def _runs(self, start_s: float, length: int) -> list[tuple[int, int]]:
        """Return who made how many tokens: token k was sampled at start_s + k * token_s."""
        place = bisect.bisect_right(self._flips_s, start_s) - 1
        runs: list[tuple[int, int]] = []
        done = 0
        for after_s, version in zip(self._flips_s[place + 1 :], self._served[place:], strict=False):
            until = min(length, math.ceil((after_s - start_s) / self.token_s))
            runs.append((version, until - done))
            done = until
        return [*runs, (self._served[-1], length - done)]


class PacedTask:
    """Prompts by number; a completion earns the share of its tokens that are odd. Satisfies `Task`."""

    def prompts(self, step: int, num_prompts: int) -> list[Prompt]:
        """Return the prompts of `step`."""
        return [_prompt(step * num_prompts + place) for place in range(num_prompts)]

    def validation_prompts(self, num_prompts: int) -> list[Prompt]:
        """Return one that is never trained, for a validation that costs nothing."""
        return [_prompt((1 << 40) + place) for place in range(num_prompts)]

    def score(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """Return the share of odd tokens."""
        del prompt
        odd = int(np.count_nonzero(trajectory.token_ids & 1)) / trajectory.num_tokens
        return Score(reward=odd, correct=odd > 0.5)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the numbers."""
        return " ".join(map(str, token_ids))

    def stop_token_ids(self) -> tuple[int, ...]:
        """Return none: lengths are drawn."""
        return ()


def _prompt(number: int) -> Prompt:
    digits = tuple(number // VOCAB**place % VOCAB for place in range(PROMPT_TOKENS))
    return Prompt(uid=str(number), text=str(number), token_ids=digits)


@dataclass(slots=True, eq=False)
class TimedJournal:
    """Keeps events where `inner` keeps them, and the seconds that took; and when groups were finished and taken."""

    inner: Journal
    seconds: float = 0.0
    finished_s: dict[int, float] = field(default_factory=dict[int, float])
    taken: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])

    def write(self, event: Event) -> None:
        """Keep it."""
        match event:
            case Finished():
                self.finished_s[event.index] = now_s()
            case Taken():
                self.taken[event.step] = event.indices
            case _:
                pass
        started_s = time.perf_counter()
        self.inner.write(event)
        self.seconds += time.perf_counter() - started_s

    def flush(self) -> None:
        """Return once it outlives the process."""
        self.inner.flush()

    def events(self, start: int = 0) -> Iterable[Event]:
        """Return what is kept."""
        return self.inner.events(start)

    def forget(self, before_step: int) -> None:
        """Drop what is not needed any more."""
        started_s = time.perf_counter()
        self.inner.forget(before_step)
        self.seconds += time.perf_counter() - started_s

    def close(self) -> None:
        """Release it."""
        self.inner.close()


class StepLog:
    """A `Reporter` that keeps the moment of each phase of each step, on the loop's clock and of the CPU.

    `began[name][n]` is when phase `name` began for the n-th time; `ended` and `cpu_s` hold one moment per step.
    """

    def __init__(self, not_ours: Callable[[], float] = lambda: 0.0) -> None:
        """Start with nothing; `not_ours` gives the CPU seconds so far that are not to be counted."""
        self._not_ours = not_ours
        self.began: defaultdict[str, list[float]] = defaultdict(list)
        self.ended: list[float] = []
        self.cpu_s: list[float] = []
        self.values: list[dict[str, float]] = []

    def phase(self, name: str, detail: str = "") -> None:
        """Keep the moment."""
        del detail
        self.began[name].append(now_s())

    def metrics(self, step: int, metrics: Sequence[Metric]) -> None:
        """Keep the moment, and what was measured."""
        del step
        self.ended.append(now_s())
        self.cpu_s.append(time.process_time() - self._not_ours())
        self.values.append({metric.key: metric.reduction.value() for metric in metrics})

    def samples(self, step: int, title: str, groups: Sequence[Group], texts: Sequence[Sequence[str]]) -> None:
        """Not kept."""

    def summary(self, values: Mapping[str, object]) -> None:
        """Not kept."""

    def close(self) -> None:
        """Nothing to release."""
