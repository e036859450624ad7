"""The exceptions of offbeat-engine: one root, each subclass also the stdlib type a caller would expect."""

from __future__ import annotations


class EngineError(Exception):
    """Root of everything offbeat-engine raises on purpose."""


class ConfigError(EngineError, ValueError):
    """A setting, or a combination of settings, that the engine cannot honour."""


class BatchError(EngineError, ValueError):
    """A batch that breaks the written schema of `TrainBatch`."""


class CheckpointError(EngineError, RuntimeError):
    """A checkpoint that cannot be written, found or loaded."""


class StepError(EngineError, RuntimeError):
    """A loss or a hook raised on some rank; all ranks raise this, the failed one from what it raised."""


class NonFiniteError(EngineError, ArithmeticError):
    """A loss or gradient norm that is not finite, agreed on by all ranks."""


class StateError(EngineError, RuntimeError):
    """A method called out of order (say, before `init_model`)."""


class RankLostError(EngineError, RuntimeError):
    """Another rank did not come to where all ranks meet: it died, hangs, or raised alone."""
