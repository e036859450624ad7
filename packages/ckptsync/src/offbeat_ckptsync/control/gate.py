"""What a member closes around its flip: generation, and where trainer and replica share a device, the engine's memory."""

from __future__ import annotations

from abc import ABC, abstractmethod

WEIGHTS, CACHE = "weights", "kv_cache"
"""What `GenerationGate.wake` wakes: the words of vLLM's sleep mode."""


class GenerationGate(ABC):
    """What a member pauses around its flip.

    What happens to requests in flight and to cached keys and values is the gate's business: a sync does not touch
    keys and values computed under the old weights.
    """

    shares_device: bool = False
    """Whether trainer and replica are on one device (hybrid mode).

    The gate is then closed from `begin` on and the engine sleeps while bytes arrive: the weights of both versions and the
    cache are never on the device together. A failure before the flip wakes the replica as it was.
    """

    @abstractmethod
    async def pause(self) -> None:
        """Stop generating; return when no forward pass runs."""

    @abstractmethod
    async def resume(self) -> None:
        """Go on generating."""

    async def sleep(self) -> None:  # noqa: B027 -- optional
        """Free the device memory of cache and weights, where the engine can; called while closed.

        The weights must come back with `wake`: until the flip they are the only copy of the old version (vLLM: level 1;
        level 2 would throw them away).
        """

    async def wake(self, tags: list[str]) -> None:  # noqa: B027 -- optional
        """Take back the memory of `tags`, "weights" or "kv_cache"; what has none to take back does nothing."""


class NoGate(GenerationGate):
    """For members that nothing generates with while they flip."""

    async def pause(self) -> None:
        """Do nothing."""

    async def resume(self) -> None:
        """Do nothing."""
