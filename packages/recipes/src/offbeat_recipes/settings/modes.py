"""The section `mode`: one class for each way in which generation and training take turns."""

# No `from __future__ import annotations` here: pydantic reads these annotations at run time.
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from offbeat_trainer.config import AsyncConfig, OnStall


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncMode:
    """Generate and train in turns, on fresh weights. What `AsyncConfig` has else is its nature."""

    name: Literal["sync"] = "sync"  # how generation and training take turns
    max_attempts: int = 3  # how often a group is tried before it is dropped
    on_stall: OnStall = OnStall.STOP  # what follows when nothing moves for `trainer.step_timeout_s`


@dataclass(frozen=True, slots=True, kw_only=True)
class OneStepOffMode:
    """Generate the next step's groups while this one trains. What `AsyncConfig` has else is its nature."""

    name: Literal["one_step_off"] = "one_step_off"
    max_attempts: int = 3  # how often a group is tried before it is dropped
    on_stall: OnStall = OnStall.STOP  # what follows when nothing moves for `trainer.step_timeout_s`


@dataclass(frozen=True, slots=True, kw_only=True)
class FullyAsyncMode(AsyncConfig):
    """Generate as far ahead as `max_staleness` allows."""

    name: Literal["fully_async"] = "fully_async"


ModeConfig: TypeAlias = Annotated[SyncMode | OneStepOffMode | FullyAsyncMode, Field(discriminator="name")]
