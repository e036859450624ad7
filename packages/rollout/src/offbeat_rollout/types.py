"""The values rollout hands out. T = tokens of a completion, P = tokens of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Finish(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class PauseMode(StrEnum):
    """What happens to running requests at a pause.

    KEEP freezes them where they are; ABORT ends them with `Finish.ABORT` and what they have; WAIT lets them end.
    """

    KEEP = "keep"
    ABORT = "abort"
    WAIT = "wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample. `temperature` 0 is greedy; `top_k` -1 and `top_p` 1 are off.

    `seed` makes one request reproducible, whatever else is in the batch.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One completion to make from `prompt_ids` [P]; token in, token out.

    Requests with the same `session` go to the same replica while that is fair: the turns of one trajectory, say, whose
    prompts grow.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    session: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What one request gave.

    `logprobs` are the sampler's own, after temperature and truncation; for greedy requests they are taken at
    temperature 1. `policy_versions` names, per token, the version of the weights that made it. A token that ended
    the completion (end of sequence) is part of `token_ids`.
    """

    request_id: str
    token_ids: tuple[int, ...]  # [T]
    logprobs: tuple[float, ...]  # [T]
    policy_versions: tuple[int, ...]  # [T]
    finish: Finish

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.logprobs) == len(self.policy_versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Answer to "are you there?": the version served, requests running, and words for a person.

    `tokens_made` tells progress: it rises while the engine generates. None: the adapter cannot tell.
    """

    ok: bool
    version: int
    num_running: int
    detail: str = ""
    tokens_made: int | None = None
    paused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCapabilities:
    """What an adapter can do, declared before anything starts.

    `missing` names absent features with the reason, to be printed by the dry run. `sleep_devices` are those whose memory
    `sleep` gives back; on others it may be accepted, and frees nothing.
    """

    adapter: str
    devices: frozenset[str]
    dtypes: frozenset[str]
    features: frozenset[str]
    missing: dict[str, str]
    sleep_devices: frozenset[str] = frozenset()
