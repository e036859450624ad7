"""The exceptions of offbeat-rollout."""

from __future__ import annotations


class RolloutError(Exception):
    """Root of everything offbeat-rollout raises on purpose."""


class ConfigError(RolloutError, ValueError):
    """A setting that the adapter cannot honour."""


class RequestError(RolloutError, ValueError):
    """A request that cannot be served as it is (say, a prompt longer than the context)."""


class RequestTimeout(RolloutError):
    """A request got no token for longer than it may, on an engine that is well: the request's fault, nobody else's."""


class CompletionError(RolloutError, ValueError):
    """A completion whose parts do not fit each other, which an engine must never hand out."""


class EngineStateError(RolloutError, RuntimeError):
    """A call out of order (say, `generate` before `start`), or an engine that stopped answering."""


class ReplicaGone(RolloutError, ConnectionError):
    """A replica died or missed its deadline; `replica` names it."""

    def __init__(self, replica: str, why: str) -> None:
        super().__init__(f"replica {replica!r} is gone: {why}")
        self.replica = replica
        self.why = why

    def __reduce__(self) -> tuple[type[ReplicaGone], tuple[str, str]]:
        return type(self), (self.replica, self.why)


class NoReplica(RolloutError, RuntimeError):
    """No replica is alive and at a version that may serve."""


class UpdateRefused(RolloutError, RuntimeError):
    """A weight update was refused before any parameter changed; the old version goes on serving.

    Its text ends with `MARK`: vLLM passes on the text of what its workers raise, and not the type, so the type is in it.
    """

    MARK = " (offbeat_rollout.UpdateRefused)"

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why

    def __str__(self) -> str:
        return f"{self.why}{self.MARK}"
