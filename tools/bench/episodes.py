#!/usr/bin/env python3
"""What episodes of many turns cost the driver: processor, memory, and tokens that replicas have to read anew.

    uv run tools/bench/episodes.py --json

Replicas are scripted and take no processor: each turn comes after `--turn-s`, or at once. Two ways to the same episodes, `--only`
picks one:

  harness      clients in another process talk to the endpoint over HTTP, as agents do
  environment  an environment in processes of its own answers each turn

For each: `cpu_share`, processor seconds of the driver per second with `--concurrent` episodes under way; `mib_per_10k_episodes`,
what its memory grew by from the first quarter of `--episodes` to the last that begins, at full speed, without what the C library holds free for
the next allocation (`held_mib` at the end); `read_per_turn`, tokens of a turn's prompt
after the longest prefix that its session's replica has, and `sent_per_turn`, all of them; `read_last_over_first` compares the last turn with
the second. Progress goes to stderr. With --json the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import os
import string
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from runner import BenchError, guarded, say

from offbeat_recipes.library.harness import Endpoint, Harness
from offbeat_recipes.tasks.chars import char_tokenizer
from offbeat_recipes.testing import ScriptedReplicas
from offbeat_rollout import SamplingParams
from offbeat_trainer import Feedback, Prompt
from offbeat_trainer.config import EnvironmentConfig
from offbeat_trainer.rollouts.multi import EnvironmentSetup, MultiTurn
from offbeat_trainer.rollouts.processes import EnvironmentProcesses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat_rollout import Completion, GenerateRequest
    from offbeat_trainer import Action, Rollout
    from offbeat_trainer.rollouts.own import RolloutSetup

TURNS = 10
ANSWER, OBSERVED = "an answer of some thirty tokens", "what was seen;"
SAMPLING = SamplingParams(max_tokens=64, temperature=1.0, seed=1)
TEMPLATE = "{% for m in messages %}{{ m.content }};{% endfor %}"
WAYS = ("harness", "environment")
CLIENTS = (sys.executable, str(Path(__file__).with_name("episodes_clients.py")), str(TURNS), OBSERVED)


class Replicas(ScriptedReplicas):
    """Replicas that count: what of a prompt comes after the longest prefix that they have of its session."""

    def __init__(self, turn_s: float) -> None:
        """Take `turn_s` for each turn."""
        tokenizer = char_tokenizer(string.printable)
        tokenizer.chat_template = TEMPLATE
        super().__init__(tokenizer, ANSWER)
        self.turn_s = turn_s
        self.sent, self.read, self.turns = Counter[int](), Counter[int](), Counter[int]()
        self._known: dict[str | None, tuple[int, tuple[int, ...]]] = {}

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Answer after `turn_s`, and count."""
        await asyncio.sleep(self.turn_s)
        made = await super().generate_many(requests)
        self.requests.clear()
        for request, completion in zip(requests, made, strict=True):
            self._count(request, completion)
        return made

    def _count(self, request: GenerateRequest, completion: Completion) -> None:
        turn, known = self._known.pop(request.session, (0, ()))
        ids = request.prompt_ids
        shared = len(known) if ids[: len(known)] == known else _prefix(known, ids)
        self.turns[turn] += 1
        self.sent[turn] += len(ids)
        self.read[turn] += len(ids) - shared
        if turn + 1 < TURNS:
            self._known[request.session] = (turn + 1, (*ids, *completion.token_ids.tolist()))


def _prefix(one: Sequence[int], other: Sequence[int]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


class Seen:
    """The environment: it says the same after each turn, and is worth a tenth for it."""

    def reset(self, prompt: Prompt, seed: int) -> str:
        """Say nothing."""
        del prompt, seed
        self.turn = 0
        return ""

    async def step(self, action: Action) -> Feedback:
        """Say what was seen."""
        self.turn += 1
        return Feedback(observation=OBSERVED, reward=1 / TURNS, done=self.turn == TURNS)


class Clients(Harness):
    """The harness: its clients live in one other process."""

    def __init__(self, setup: RolloutSetup) -> None:
        """Start them with the first episode."""
        super().__init__(setup)
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._client: asyncio.Task[asyncio.subprocess.Process] | None = None

    async def play(self, prompt: Prompt, endpoint: Endpoint) -> float:
        """Have one client talk."""
        if self._client is None:
            self._client = asyncio.create_task(self._start())
        client = await asyncio.shield(self._client)
        over = self._waiting[endpoint.api_key] = asyncio.get_running_loop().create_future()
        assert client.stdin is not None
        client.stdin.write(f"{endpoint.base_url} {endpoint.api_key}\n".encode())
        await over
        return 1.0

    async def close(self) -> None:
        """End them."""
        if self._client is not None:
            client = await self._client
            client.kill()
            await client.wait()
            await self._reading
        await super().close()

    async def _start(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        client = await asyncio.create_subprocess_exec(*CLIENTS, stdin=pipe, stdout=pipe)
        self._reading = asyncio.create_task(self._read(client))
        return client

    async def _read(self, client: asyncio.subprocess.Process) -> None:
        assert client.stdout is not None
        while key := (await client.stdout.readline()).decode().strip():
            self._waiting.pop(key).set_result(None)
        for waiting in self._waiting.values():
            waiting.set_exception(BenchError("the process of the clients ended; it says why above"))


def rollout_of(way: str, replicas: Replicas) -> Rollout:
    """Return the way from a prompt to its group."""
    setup = replicas.setup()
    if way == "harness":
        return Clients(setup)
    config = EnvironmentConfig(path=f"{__file__}:Seen", max_turns=TURNS, max_tokens=1 << 20, timeout_s=300.0)
    processes = EnvironmentProcesses(config)
    decode = setup.task.decode  # pyright: ignore[reportAttributeAccessIssue]
    own = EnvironmentSetup(make=processes.make, decode=decode, encode=setup.encode, close=processes.close)
    return MultiTurn(setup.generator, own, config)  # pyright: ignore[reportArgumentType]


def mib() -> float:
    """Return the memory of this process now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def trimmed_mib() -> float:
    """Return the memory of this process after the C library gave back what nobody uses."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return mib()


async def play(way: str, replicas: Replicas, concurrent: int, episodes: int) -> dict[str, float]:
    """Play `episodes` with `concurrent` at a time; what counts lies between the first quarter and the last that begins."""
    rollout, numbers = rollout_of(way, replicas), iter(range(episodes))
    ids = tuple(replicas.tokenizer("begin;", add_special_tokens=False)["input_ids"])
    marks: list[tuple[float, float, float, float]] = []
    done, counted = 0, (episodes // 4, episodes - concurrent)

    async def player() -> None:
        nonlocal done
        for number in numbers:
            prompt = Prompt(uid=str(number), text="begin", token_ids=ids)
            group = await rollout.run(prompt, SAMPLING, 1)
            [trajectory] = group.trajectories
            if len(trajectory.turns) != TURNS or len(trajectory.rows) != 1:
                raise BenchError(
                    f"{way}: an episode of {len(trajectory.turns)} turns in {len(trajectory.rows)} rows"
                )
            done += 1
            if done in counted:
                times, held = (time.perf_counter(), time.process_time()), mib()
                marks.append((*times, trimmed_mib(), held))

    try:
        async with asyncio.TaskGroup() as players:
            for place in range(min(concurrent, episodes)):
                players.create_task(player(), name=f"player {place}")
    finally:
        await rollout.close()
    (began_s, cpu_s, before, _), (ended_s, cpu_end_s, after, held) = marks
    played = counted[1] - counted[0]
    return {
        "turns_per_s": round(played * TURNS / (ended_s - began_s), 1),
        "cpu_share": round((cpu_end_s - cpu_s) / (ended_s - began_s), 3),
        "cpu_ms_per_turn": round(1e3 * (cpu_end_s - cpu_s) / (played * TURNS), 3),
        "mib": round(after, 1),
        "held_mib": round(held - after, 1),
        "mib_per_10k_episodes": round((after - before) * 1e4 / played, 2),
    }


async def measure(way: str, options: argparse.Namespace) -> dict[str, object]:
    """Return what episodes played in one `way` cost: as fast as replicas answer, and as fast as the driver can."""
    paced = await play(way, Replicas(options.turn_s), options.concurrent, options.paced_episodes)
    say(f"  {way}, a turn each {options.turn_s:g} s: {paced}")
    replicas = Replicas(0.0)
    full = await play(way, replicas, options.concurrent, options.episodes)
    say(f"  {way}, at once: {full}")
    turns = replicas.turns.total()
    per_turn = [replicas.read[turn] / replicas.turns[turn] for turn in range(TURNS)]
    return {
        "cpu_share": paced["cpu_share"],
        "paced": paced,
        "full_speed": full,
        "mib_per_10k_episodes": full["mib_per_10k_episodes"],
        "sent_per_turn": round(replicas.sent.total() / turns, 1),
        "read_per_turn": round(replicas.read.total() / turns, 1),
        "read_last_over_first": round(per_turn[-1] / per_turn[1], 3),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--only", default=",".join(WAYS), help="ways to measure, by commas")
    parser.add_argument("--concurrent", type=int, default=500, help="episodes at a time")
    parser.add_argument("--episodes", type=int, default=20_000, help="at full speed, for memory")
    parser.add_argument(
        "--paced-episodes",
        type=int,
        default=2000,
        help="as fast as replicas answer, for the processor; four times --concurrent or more",
    )
    parser.add_argument("--turn-s", type=float, default=2.0, help="what a replica takes for a turn")
    parser.add_argument(
        "--smallest", action="store_true", help="as little as runs every part: a check, no figures"
    )
    options = parser.parse_args()
    if options.smallest:
        options.concurrent, options.episodes, options.paced_episodes, options.turn_s = 4, 16, 8, 0.01
    options.only = options.only.split(",")
    unknown = set(options.only) - set(WAYS)
    if unknown:
        parser.error(f"--only: expected some of {', '.join(WAYS)}, got {', '.join(sorted(unknown))}")
    return options


def main() -> int:
    """Measure what the command line asks for; return the exit code."""
    options = _options()
    load = os.getloadavg()[0]
    answer: dict[str, object] = {way: asyncio.run(measure(way, options)) for way in options.only}
    answer["machine"] = {"cores": len(os.sched_getaffinity(0)), "load_before": round(load, 2)}
    print(json.dumps(answer, indent=None if options.json else 2))
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
