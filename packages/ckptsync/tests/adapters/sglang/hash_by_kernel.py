# pyright: basic
"""Prints what SGLang's kernel for GPUs says of bytes, in SGLang's environment: `python hash_by_kernel.py SIZE..`.

The kernel runs in Triton's interpreter; what is done around it is SGLang's `gpu_tensor_hash` without its demand for a GPU.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import torch

sglang = find_spec("sglang")
assert sglang is not None
assert sglang.origin is not None
PLACE = Path(sglang.origin).parent / "kernels" / "ops" / "memory" / "gpu_tensor_hash.py"
SPEC = spec_from_file_location("gpu_tensor_hash", PLACE)
assert SPEC is not None
assert SPEC.loader is not None
theirs = module_from_spec(SPEC)
SPEC.loader.exec_module(theirs)


def hashed(data: torch.Tensor) -> int:
    words = torch.nn.functional.pad(data, (0, -len(data) % 4)).view(torch.uint32)
    if not len(words):
        return 0
    seed = 0x243F6A88
    tiles = torch.empty(-(-len(words) // 8192), dtype=torch.uint64)
    theirs.hash_tiles32_kernel_blocked[(len(tiles),)](
        words,
        tiles,
        len(words),
        seed1=seed & 0xFFFFFFFF,
        seed2=((seed * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF,
        FM_C1=theirs.FMIX32_C1,
        FM_C2=theirs.FMIX32_C2,
        POS_A=theirs.POS_C1,
        POS_B=theirs.POS_C2,
        TILE=8192,
        BLOCK=256,
        USE_CG=True,
    )
    while len(tiles) > 1:
        fewer = torch.empty(-(-len(tiles) // 1024), dtype=torch.uint64)
        theirs.add_tree_reduce_u64_kernel[(len(fewer),)](tiles, fewer, len(tiles), CHUNK=1024)
        tiles = fewer
    return theirs._final_splitmix64(int(tiles.item()))


def made(size: int) -> torch.Tensor:
    return torch.arange(size).mul(2654435761).add(size).bitwise_right_shift(7).to(torch.uint8)


print(json.dumps([hashed(made(int(size))) for size in sys.argv[1:]]))
