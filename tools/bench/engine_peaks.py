"""One peak of memory, in a process of its own: engine_peaks.py logprobs|offload HOW MODEL SETTINGS."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import hashlib
import json
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from engine_loops import batch_of, engine_on

from offbeat_engine import World

MIB = 1 << 20
TOKENS, HIDDEN, VOCAB = 2048, 256, 32_768


class Peak:
    """The most memory held from here on: of the device's allocator, or of this process."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated() / MIB
        else:
            # Not `ru_maxrss`: that one remembers the process we were forked from.
            Path("/proc/self/clear_refs").write_text("5")
            self._before = _status_mib("VmRSS")

    def mib(self) -> float:
        """Return the peak above what was held at the start."""
        highest = torch.cuda.max_memory_allocated() / MIB if self._cuda else _status_mib("VmHWM")
        return highest - self._before


def _status_mib(field: str) -> float:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def logprobs(how: str, device: str, scale: int) -> dict[str, Any]:
    """Log-probs and entropy of 2,048 tokens from 32 k words, forward and backward."""
    torch.manual_seed(0)
    tokens, vocab = TOKENS // scale, VOCAB // scale
    head = torch.nn.Linear(HIDDEN, vocab, bias=False, device=device)
    hidden = torch.randn(tokens, HIDDEN, device=device, requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,), device=device)
    peak = Peak(device)
    started = time.perf_counter()
    if how == "plain":
        all_logprobs = torch.log_softmax(head(hidden), -1)
        picked = all_logprobs.gather(1, targets[:, None]).squeeze(1)
        with torch.no_grad():
            entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    else:
        from offbeat_engine.toolkit.step.logprobs import token_logprobs

        picked, entropy = token_logprobs(hidden, head, targets, None, entropy_gradient=False)
    picked.mean().backward()
    seconds = time.perf_counter() - started
    assert hidden.grad is not None
    return {
        "peak_mib": peak.mib(),
        "seconds": seconds,
        "entropy": float(entropy.mean()),
        "grad": float(hidden.grad.norm()),
    }


def offload(how: str, model: str, size: Any) -> dict[str, Any]:  # noqa: ANN401
    """Two steps with weights and moments in host memory between them, or not; the weights' bits afterwards."""
    peak = Peak(size.device)
    settings = {"offload_parameters": how == "on", "offload_optimizer": how == "on"}
    engine = engine_on(World(device=size.device), model, size, **settings)
    batch = batch_of(size, [size.tokens] * size.sequences)
    for _ in range(2):
        engine.step(batch)
    idle = torch.cuda.memory_allocated() / MIB if size.device == "cuda" else None
    digest = hashlib.sha256()
    for _, tensor in engine.engine.named_weights():
        digest.update(tensor.detach().cpu().float().numpy().tobytes())
    return {"peak_mib": peak.mib(), "idle_mib": idle, "bits": digest.hexdigest()}


def main() -> None:
    """Print one JSON object."""
    what, how, model, settings = sys.argv[1:]
    size = SimpleNamespace(**json.loads(settings))
    torch.manual_seed(0)
    answer = logprobs(how, size.device, size.scale) if what == "logprobs" else offload(how, model, size)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
