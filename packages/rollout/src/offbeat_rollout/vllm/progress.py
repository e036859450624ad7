"""What vLLM is doing, read where it keeps the tokens of requests under way; nothing is asked of its processes."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportMissingTypeStubs=false
# vLLM types its interfaces in part.

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat_rollout.clock import Work

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class Progress:
    """Tokens made so far, and the requests that have one: those without queue, or their prompts are being computed."""

    def __init__(self) -> None:
        self.ended = 0  # tokens of the requests that have ended
        self.paused = False
        self._llm: AsyncLLM | None = None

    def follow(self, llm: AsyncLLM) -> None:
        """Look at this engine from now on; it has made nothing yet."""
        self.ended, self.paused, self._llm = 0, False, llm

    def work(self) -> Work:
        """Return what is being done now."""
        made = self._made()
        return Work(
            tokens_made=self.ended + sum(made.values()),
            at_work=[name for name, count in made.items() if count],
            paused=self.paused,
        )

    def without_tokens(self) -> list[str]:
        """Return the requests under way that have no token yet."""
        return [name for name, count in self._made().items() if not count]

    def _made(self) -> dict[str, int]:
        states = () if self._llm is None else self._llm.output_processor.request_states.values()
        return {
            state.external_req_id: state.detokenizer.num_output_tokens()
            for state in states
            if state.detokenizer is not None
        }
