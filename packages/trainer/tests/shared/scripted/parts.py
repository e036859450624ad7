"""A whole run without engines: a policy of a few numbers that really learns, replicas that take time and nothing else.

Everything follows the protocols of `offbeat_trainer.data.interface` and runs in whatever time the event loop keeps; on a
`VirtualLoop` a thousand steps take seconds. V = tokens of the vocabulary; token 0 ends a completion.
"""

from __future__ import annotations

import asyncio
import bisect
import hashlib
import io
import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from offbeat_ckptsync import SyncReport
from offbeat_rollout import Completion, Finish
from offbeat_trainer.data.metrics import Max, Mean, Metric
from offbeat_trainer.data.types import Prompt, Score
from offbeat_trainer.watch.watchdog import now_s

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from offbeat_engine import TrainBatch
    from offbeat_rollout import GenerateRequest
    from offbeat_trainer.data.types import Trajectory
    from offbeat_trainer.rollouts.environment import Observation

VOCAB = 16
STOP = 0
PROMPT_TOKENS = 4
HELD_OUT = 40_000  # numbers from here on are never trained


class ScriptedTask:
    """Prompts by number; a completion earns the share of its tokens that are odd. Satisfies `Task`, and scores."""

    def prompts(self, step: int, num_prompts: int) -> list[Prompt]:
        """Return prompts whose uid says which they are."""
        return [_prompt(step * num_prompts + place) for place in range(num_prompts)]

    def validation_prompts(self, num_prompts: int) -> list[Prompt]:
        """Return other prompts."""
        return [_prompt(HELD_OUT + place) for place in range(num_prompts)]

    def score(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """Return the share of odd tokens."""
        del prompt
        odd = int((trajectory.token_ids % 2).sum()) / trajectory.num_tokens
        return Score(reward=odd, correct=odd > 0.5)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the numbers."""
        return " ".join(map(str, token_ids))

    def encode(self, said: Observation, last: int | None) -> list[int]:
        """Return numbers as they are, and those that a text names."""
        del last
        words = said.split() if isinstance(said, str) else said
        return [int(word) for word in words if not isinstance(word, Mapping)]

    def stop_token_ids(self) -> tuple[int, ...]:
        """Return `STOP`."""
        return (STOP,)


class FlatTask(ScriptedTask):
    """Of every `every` prompts the completions of one are worth the same; those of the others all something else."""

    def __init__(self, every: int) -> None:
        """See above."""
        self.every = every

    def score(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """Return 0, or a number that says which completion it is."""
        flat = prompt_number(prompt.token_ids) % self.every == 0
        value = float(trajectory.token_ids @ range(1, 1 + len(trajectory.token_ids)))
        return Score(reward=0.0 if flat else value, correct=None)


def prompt_number(token_ids: Sequence[int]) -> int:
    """Return which prompt of `ScriptedTask` a sequence begins with."""
    return sum((token - 1) * (VOCAB - 1) ** place for place, token in enumerate(token_ids[:PROMPT_TOKENS]))


def _prompt(number: int) -> Prompt:
    digits = tuple(1 + number // (VOCAB - 1) ** place % (VOCAB - 1) for place in range(PROMPT_TOKENS))
    return Prompt(uid=str(number), text=str(number), token_ids=digits)


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    request: GenerateRequest
    answer: asyncio.Future[Completion]
    uniforms: list[
        float
    ]  # one per token, used by position: where a plan is made anew, the same ones are used
    token_s: float
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    planned: list[int] = field(default_factory=list[int])
    planned_s: float = 0.0
    timer: asyncio.TimerHandle | None = None


class ScriptedPool:
    """Replicas: tokens sampled from the published logits [V], at a pace. `generate_many` and `abort` as a pool's.

    `pace(request)` gives the seconds per token. `mishap(request, attempt)` may give an error for a call to
    fail with instead, by its first request; attempts count calls that begin with this prompt and seed. `made` counts tokens, `served` requests that ended.
    """

    def __init__(
        self,
        pace: Callable[[GenerateRequest], float] = lambda request: 0.01,
        mishap: Callable[[GenerateRequest, int], Exception | None] = lambda request, attempt: None,
    ) -> None:
        """Serve nothing yet: `flip` brings the first weights."""
        self.version = 0
        self.made = 0
        self.served = 0
        self._pace = pace
        self._mishap = mishap
        self._logprobs: list[float] = []
        self._sums: list[float] = []
        self._jobs: dict[str, _Job] = {}
        self._attempts: dict[tuple[object, ...], int] = {}

    def flip(self, version: int, logits: Sequence[float]) -> None:
        """Serve `version` from now on; what is under way goes on under it."""
        norm = math.log(math.fsum(math.exp(one) for one in logits))
        for job in self._jobs.values():
            self._settle(job)
        self.version = version
        self._logprobs = [one - norm for one in logits]
        self._sums = list(itertools.accumulate(math.exp(one) for one in self._logprobs))
        for job in self._jobs.values():
            self._plan(job)

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Return the completions of `requests`, in their order."""
        first = requests[0]
        key = (first.prompt_ids, first.sampling.seed)
        self._attempts[key] = self._attempts.get(key, 0) + 1
        error = self._mishap(first, self._attempts[key])
        if error is not None:
            await asyncio.sleep(self._pace(first))
            raise error
        jobs = [self._start(request) for request in requests]
        try:
            return list(await asyncio.gather(*(job.answer for job in jobs)))
        finally:
            for job in jobs:
                self._forget(job)

    async def abort(self, request_ids: Collection[str]) -> None:
        """End these with what they have."""
        for name in request_ids:
            if name in self._jobs:
                job = self._jobs[name]
                self._settle(job)
                self._end(job, Finish.ABORT)

    def _start(self, request: GenerateRequest) -> _Job:
        draws = random.Random(request.sampling.seed)
        job = _Job(
            request=request,
            answer=asyncio.get_running_loop().create_future(),
            uniforms=[draws.random() for _ in range(request.sampling.max_tokens)],
            token_s=self._pace(request),
        )
        assert request.request_id not in self._jobs, "request ids are unique while they run"
        self._jobs[request.request_id] = job
        self._plan(job)
        return job

    def _plan(self, job: _Job) -> None:
        """Draw the rest of a completion under the weights of now, to be made at its pace."""
        job.planned, job.planned_s = [], now_s()
        for uniform in job.uniforms[len(job.tokens) :]:
            job.planned.append(self._draw(job, uniform))
            if job.planned[-1] == STOP:
                break
        when_s = job.planned_s + job.token_s * len(job.planned)
        job.timer = asyncio.get_running_loop().call_at(when_s, self._ended, job)

    def _draw(self, job: _Job, uniform: float) -> int:
        if job.request.sampling.temperature == 0:
            return max(range(VOCAB), key=self._logprobs.__getitem__)
        return min(bisect.bisect(self._sums, uniform), VOCAB - 1)

    def _settle(self, job: _Job, *, all_planned: bool = False) -> None:
        """Count what was made by now as made, and forget the rest of the plan."""
        passed = len(job.planned)
        if not all_planned:
            passed = min(passed - 1, int((now_s() - job.planned_s) / job.token_s))
        made = job.planned[:passed]
        job.tokens += made
        job.logprobs += [self._logprobs[token] for token in made]
        job.versions += [self.version] * len(made)
        self.made += len(made)
        if job.timer is not None:
            job.timer.cancel()
            job.timer = None

    def _ended(self, job: _Job) -> None:
        self._settle(job, all_planned=True)
        self._end(job, Finish.STOP if job.tokens[-1] == STOP else Finish.LENGTH)

    def _end(self, job: _Job, finish: Finish) -> None:
        self._forget(job)
        self.served += finish is not Finish.ABORT
        if not job.answer.done():
            job.answer.set_result(
                Completion.of(
                    request_id=job.request.request_id,
                    token_ids=job.tokens,
                    logprobs=job.logprobs,
                    policy_versions=job.versions,
                    finish=finish,
                )
            )

    def _forget(self, job: _Job) -> None:
        self._jobs.pop(job.request.request_id, None)
        if job.timer is not None:
            job.timer.cancel()


class ScriptedPolicy:
    """Logits [V] that follow the policy gradient. Satisfies `Policy`.

    `history` is the digest of every (token, log-prob, version, advantage) that made the weights of now, in order: it is
    saved and loaded with them; so is `prompts`, the numbers of each step's prompts by sequence. `batches` are those of
    this process.
    """

    def __init__(
        self, folder: Path, *, train_s: Callable[[int], float] = lambda step: 1.0, lr: float = 0.5
    ) -> None:
        """Save to `folder`; the update of the n-th batch takes `train_s(n)` seconds."""
        self.logits = torch.zeros(VOCAB, dtype=torch.float64)
        self.history = hashlib.sha256(b"").hexdigest()
        self.steps = 0
        self.prompts: list[list[int]] = []
        self.batches: list[TrainBatch] = []
        self.states: list[dict[str, float]] = []  # of the algorithm, by update
        self._folder = folder
        self._train_s = train_s
        self._lr = lr

    async def update(self, batch: TrainBatch, state: Mapping[str, float] | None = None) -> list[Metric]:
        """Step along the policy gradient of the batch."""
        self.states.append(dict(state or {}))
        await asyncio.sleep(self._train_s(self.steps))
        mask_BT = batch["loss_mask"]
        tokens_T = batch["input_ids"][mask_BT]
        advantages_T = batch["advantages"][mask_BT].double()
        logprobs_V = self.logits.log_softmax(0)
        onehot_TV = torch.nn.functional.one_hot(tokens_T, VOCAB).double()
        gradient_V = (advantages_T[:, None] * (onehot_TV - logprobs_V.exp())).sum(0) / len(tokens_T)
        self.logits = self.logits + self._lr * gradient_V
        self._note(batch)
        diff_T = (batch["rollout_logprobs"][mask_BT].double() - logprobs_V[tokens_T]).abs()
        return [
            Metric("train/grad_norm", Mean(float(gradient_V.norm()))),
            Metric("mismatch/max_abs_logprob_diff", Max(float(diff_T.max()))),
        ]

    async def supervise(self, batch: TrainBatch) -> list[Metric]:
        """Not this one's business."""
        raise NotImplementedError(
            f"this policy learns from rewards only, not from {batch.batch_size} examples"
        )

    async def save(self, step: int, *, block: bool) -> None:
        """Write everything, atomically; never in the background."""
        del block
        assert step == self.steps, f"{self.steps} batches were trained, and this is to be step {step}"
        self._folder.mkdir(parents=True, exist_ok=True)
        data = io.BytesIO()
        torch.save(
            {"logits": self.logits, "history": self.history, "steps": self.steps, "prompts": self.prompts},
            data,
        )
        beside = self._folder / "writing"
        beside.write_bytes(data.getvalue())
        beside.replace(self._folder / f"policy_{step:06d}.pt")

    async def load(self, step: int | None) -> int | None:
        """Read what was saved last, or at `step`."""
        found = sorted(self._folder.glob("policy_*.pt"))
        if step is not None:
            found = [self._folder / f"policy_{step:06d}.pt"]
        if not found:
            return None
        state = torch.load(found[-1])
        self.logits, self.history = state["logits"], state["history"]
        self.steps, self.prompts = state["steps"], state["prompts"]
        return self.steps

    async def export(self, path: str) -> None:
        """Write the logits."""
        torch.save(self.logits, path)

    def _note(self, batch: TrainBatch) -> None:
        """Take a batch into the history."""
        digest = hashlib.sha256(self.history.encode())
        for key in ("input_ids", "rollout_logprobs", "policy_version", "advantages"):
            digest.update(batch[key].numpy().tobytes())
        self.history = digest.hexdigest()
        self.steps += 1
        self.prompts.append([prompt_number(token_ids) for token_ids in batch["input_ids"].tolist()])
        self.batches.append(batch)


class ScriptedPublisher:
    """Brings a policy's logits to a pool. Satisfies `Publisher`. `flips` holds (seconds, version)."""

    def __init__(self, policy: ScriptedPolicy, pool: ScriptedPool, *, sync_s: float = 0.05) -> None:
        """Take `sync_s`; the flip comes in the middle."""
        self.flips: list[tuple[float, int]] = []
        self._policy = policy
        self._pool = pool
        self._sync_s = sync_s

    async def publish(self, version: int, gathered: Callable[[], None] | None = None) -> SyncReport:
        """Bring `version`; the logits are copied out at once."""
        assert version == self._policy.steps + 1, "a version names the weights that so many steps made"
        logits = [float(logit) for logit in self._policy.logits]
        if gathered is not None:
            gathered()
        await asyncio.sleep(self._sync_s / 2)
        self._pool.flip(version, logits)
        self.flips.append((now_s(), version))
        await asyncio.sleep(self._sync_s / 2)
        return SyncReport(
            version=version,
            transport="scripted",
            num_members=1,
            num_tensors=1,
            num_buckets=1,
            num_bytes=VOCAB * 8,
            total_s=self._sync_s,
            pause_s=0.0,
            gb_per_s=VOCAB * 8e-9 / self._sync_s,
            begin_s=0.0,
            transfer_s=self._sync_s,
            verify_s=0.0,
            flip_s=0.0,
            commit_s=0.0,
            gather_s=0.0,
            pack_s=0.0,
            wire_s=self._sync_s,
            load_s=0.0,
        )
