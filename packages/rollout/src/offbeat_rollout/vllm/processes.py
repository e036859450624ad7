"""Starting vLLM and knowing which processes came of it, so that stopping leaves none behind."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportMissingTypeStubs=false
# vLLM types its interfaces in part.

from __future__ import annotations

import contextlib
import multiprocessing
from typing import TYPE_CHECKING

from offbeat_rollout.errors import ConfigError

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from vllm.v1.engine.async_llm import AsyncLLM

    from offbeat_rollout.config import RolloutConfig

_STOP_TIMEOUT_S = 20.0
_KILL_TIMEOUT_S = 5.0


class Launched:
    """The child processes of one engine. Workers below them end with their parent by vLLM's own means."""

    def __init__(self) -> None:
        self._before = frozenset(child.pid for child in multiprocessing.active_children())
        self._cancelled = False

    def run(self, config: RolloutConfig) -> AsyncLLM:
        """Build the engine; blocks until it can generate. Runs in a thread: it takes tens of seconds."""
        from vllm.v1.engine.async_llm import AsyncLLM

        from offbeat_rollout.vllm.translate import engine_args

        _check_model(config)
        llm = AsyncLLM.from_engine_args(engine_args(config))
        if self._cancelled:
            llm.shutdown()
        return llm

    def children(self) -> list[BaseProcess]:
        """Return the processes that came up since this engine began to start."""
        return [child for child in multiprocessing.active_children() if child.pid not in self._before]

    def stop(self, llm: AsyncLLM) -> None:
        """Ask vLLM to end, then end what is left."""
        children = self.children()
        with contextlib.suppress(
            Exception
        ):  # a dead engine may fail at its own goodbye; what counts comes below
            llm.shutdown(timeout=_STOP_TIMEOUT_S)
        _end(children)

    def kill(self) -> None:
        """End the processes of an engine that did not come up."""
        self._cancelled = True
        _end(self.children())


def _check_model(config: RolloutConfig) -> None:
    """Refuse what vLLM would accept now and die of at the first request."""
    if config.device != "cpu":
        return
    from transformers import AutoConfig
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    text = AutoConfig.from_pretrained(config.model_path, local_files_only=True).get_text_config()
    heads = int(text.num_attention_heads)
    head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    supported = CPUAttentionBackend.get_supported_head_sizes()
    if head_dim not in supported:
        raise ConfigError(
            f"vllm on CPU has no attention for a head dimension of {head_dim} (hidden size {text.hidden_size}, "
            f"{heads} heads); it has {', '.join(map(str, supported))}"
        )


def _end(children: list[BaseProcess]) -> None:
    for child in children:
        child.join(_KILL_TIMEOUT_S)
        if child.is_alive():
            child.kill()
            child.join(_KILL_TIMEOUT_S)
