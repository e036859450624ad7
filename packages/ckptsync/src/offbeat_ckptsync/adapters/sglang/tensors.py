"""Tensors as SGLang's session takes them: one buffer of bytes, and where in it each tensor lies (`load_format` flattened_bucket).

To a server on a CPU the bytes travel: no server depends on the memory of a process that may die. One on GPUs is told where they
lie by CUDA's IPC handles, as torch makes them, with the GPU's UUID in the place of its number, as SGLang does between
processes that count their GPUs apart (`patch_torch.py`, 0.5.23; read, and never run).
"""

# torch types its multiprocessing in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import base64
import io
import pickle
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PART_BYTES = 64 << 20
_ALIGN = 16
_DEVICE = 6  # the place of the device in the arguments of `rebuild_cuda_tensor`

Part = list[tuple[str, torch.Tensor]]


def parts_of(whole: Mapping[str, torch.Tensor]) -> Iterator[Part]:
    """Yield `whole` in parts of about 64 MiB, which is what the server holds beside its weights while it loads."""
    part: Part = []
    num_bytes = 0
    for name, tensor in whole.items():
        part.append((name, tensor.detach()))
        num_bytes += tensor.nbytes
        if num_bytes >= PART_BYTES:
            yield part
            part, num_bytes = [], 0
    if part:
        yield part


def in_parts(whole: Mapping[str, torch.Tensor], device: str, num_ranks: int) -> Iterator[list[str]]:
    """Yield bodies of `parts_of(whole)` on `device`, one for each rank of the server; ask for the next once the answer is there.

    Until then the buffer that a body tells of lives here. What of a GPU's the server holds on to longer, torch keeps for it.
    """
    for part in parts_of(whole):
        content = _flattened(part, device)
        if device == "cpu":
            yield [_body(content)] * num_ranks
        else:
            torch.cuda.synchronize(device)  # other processes know nothing of this stream
            yield [_body(content) for _ in range(num_ranks)]  # torch counts the users of each handle
            del content
            torch.cuda.ipc_collect()


def _flattened(part: Part, device: str) -> dict[str, object]:
    """Return a part as SGLang's `FlattenedTensorBucket` has it; its metadata are read by their attributes."""
    metadata: list[SimpleNamespace] = []
    end = 0
    for name, tensor in part:
        start = -(-end // _ALIGN) * _ALIGN
        end = start + tensor.nbytes
        about = {"name": name, "shape": tensor.shape, "dtype": tensor.dtype}
        metadata.append(SimpleNamespace(**about, start_idx=start, end_idx=end, numel=tensor.nbytes))
    buffer = torch.empty(end, dtype=torch.uint8, device=device)
    for (_, tensor), at in zip(part, metadata, strict=True):
        buffer[at.start_idx : at.end_idx].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return {"flattened_tensor": buffer, "metadata": metadata}


def _body(content: dict[str, object]) -> str:
    """Only SGLang's side reads pickles, and through a list of what it allows."""
    written = io.BytesIO()
    _Handles(written).dump(content)
    return base64.b64encode(written.getvalue()).decode()


class _Handles(pickle.Pickler):
    """Writes where the tensors of a GPU lie in place of what they hold."""

    def reducer_override(self, obj: Any) -> Any:  # noqa: ANN401 -- pickle's own signature
        if not (isinstance(obj, torch.Tensor) and obj.is_cuda):
            return NotImplemented
        from torch.multiprocessing.reductions import reduce_tensor

        rebuild, about = cast("tuple[object, tuple[Any, ...]]", reduce_tensor(obj))
        gpu = str(torch.cuda.get_device_properties(about[_DEVICE]).uuid)
        return rebuild, (*about[:_DEVICE], gpu, *about[_DEVICE + 1 :])
