"""Start SGLang's server on a CPU, from the wheel on PyPI alone: for tests and laptops, and never on a GPU.

`tools/setup sglang` puts a link to this file into SGLang's environment; the adapter runs it there in place of
`python -m sglang.launch_server`. It takes the server's own arguments.

SGLang's layers fall back to plain torch where the CPU kernels of `sgl-kernel` are missing, as long as nothing asks for them when
it is imported. No kernel of the model is faked here: attention, norms, sampling, scheduler and weight loading are
SGLang's own. What is done, in every process of the server, before SGLang is imported:

- names of `sgl_kernel` for speculative decoding, which SGLang imports always, are there and raise when they are called;
- `murmur_hash32_cpu`, from which a seeded draw takes its random numbers, is written in torch;
- the models' other families are not imported: the one in `--model-path` is enough;
- in deterministic mode, attention is torch's, whose results do not depend on the batch here, and Triton's
  replacements of matrix products, which no CPU runs, stay out;
- experts that routers chose are kept in memory that is not pinned for a GPU.
"""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false
# SGLang is not in the environment of this checkout.

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

CALLED_FOR_SPECULATION = (
    "copy_all_layer_kv_cache_cpu",
    "assign_req_to_token_pool_cpu",
    "rotate_input_ids_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "build_tree_kernel_efficient_cpu",
    "verify_tree_greedy_cpu",
)
WORD = 0xFFFFFFFF


def missing(name: str) -> Any:  # noqa: ANN401 a function of any shape
    """Return a stand-in for the kernel `name`."""

    def call(*_: object, **__: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name}: speculative decoding needs SGLang's CPU kernels")

    return call


def rotated(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Return 32-bit words, in 64 bits each, rotated to the left."""
    return ((x << bits) | (x >> (32 - bits))) & WORD


def mixed(h: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Mix a word into the state of MurmurHash3-32 (Appleby, smhasher); overflow of 64 bits leaves the low 32 right."""
    k = rotated((k * 0xCC9E2D51) & WORD, 15)
    h = rotated(h ^ ((k * 0x1B873593) & WORD), 13)
    return (h * 5 + 0xE6546B64) & WORD


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, cols: torch.Tensor) -> torch.Tensor:
    """Return MurmurHash3-32 of (seed low, seed high, position, column) for [N], [N] and [V], as uint32 [N, V]."""
    seed_N1 = seed.view(torch.int64)[:, None]
    h = torch.zeros_like(seed_N1)
    for word in (seed_N1 & WORD, (seed_N1 >> 32) & WORD, positions.long()[:, None] & WORD):
        h = mixed(h, word)
    h = mixed(h, cols.long()[None, :] & WORD) ^ 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & WORD
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & WORD
    return (h ^ (h >> 16)).to(torch.uint32)


def unpinned(dims: tuple[int, ...], dtype: torch.dtype, **_: object) -> torch.Tensor:
    """Return memory for a table beside the model, as SGLang asks for it on a GPU's host."""
    return torch.empty(dims, dtype=dtype)


def other_families(arguments: list[str]) -> str:
    """Return the modules of SGLang's models that do not hold the one in `--model-path`, joined by commas."""
    spec = find_spec("sglang")
    if spec is None or spec.origin is None or "--model-path" not in arguments:
        return ""
    folder = Path(arguments[arguments.index("--model-path") + 1])
    wanted = json.loads((folder / "config.json").read_text())["architectures"]
    modules = sorted((Path(spec.origin).parent / "srt" / "models").glob("*.py"))
    texts = {path.stem: path.read_text() for path in modules}
    kept = {name for name, text in texts.items() if any(f"class {one}(" in text for one in wanted)}
    return ",".join(texts.keys() - kept) if kept else ""


def prepare() -> None:
    """Make SGLang importable here; every process of the server runs this."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    if "SGLANG_DISABLED_MODEL_ARCHS" not in os.environ:  # the first process; others inherit it
        os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = other_families(sys.argv)
    kernels: Any = ModuleType("sgl_kernel")
    for name in CALLED_FOR_SPECULATION:
        setattr(kernels, name, missing(name))
    sys.modules["sgl_kernel"] = kernels
    without: Any = sys.modules
    without["vllm"] = None  # `import vllm` fails, as it does where SGLang is alone
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor cols) -> Tensor")
    library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
    globals()["_library"] = library  # it ends with the object

    from sglang.srt import batch_invariant_ops
    from sglang.srt.arg_groups import choices
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    ALLOC_MEMORY_FUNCS["cpu"] = unpinned
    choices.add_deterministic_attention_backend_choices(["torch_native"])
    setattr(batch_invariant_ops, "enable_batch_invariant_mode", lambda *_, **__: None)  # noqa: B010 it is typed


prepare()

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
