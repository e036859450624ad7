# pyright: basic
"""A rank of an engine's replica in a process of its own, driven as engines drive theirs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from offbeat_ckptsync.ends.manifest import manifest_of
from offbeat_ckptsync.ends.rank import Rank
from offbeat_ckptsync.ends.sinks import DictSink
from offbeat_ckptsync.errors import SyncError
from offbeat_ckptsync.testing import awkward_weights, prints_of

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


def serve_rank(pipe: Connection, rank: int, num_ranks: int) -> None:
    """Be one rank of a replica: a `Rank` that takes `awkward_weights`, driven through `pipe`; for a process of its own.

    Says b"ready" first. A JSON request is handled and answered with the text of its error, or with nothing, as engines do;
    b"serving" is answered with [version, prints of its weights]; b"end" ends it.
    """
    torch.set_num_threads(1)
    sink = DictSink(manifest_of(awkward_weights(0).items()))
    served = Rank(sink, rank=rank, num_ranks=num_ranks)
    pipe.send_bytes(b"ready")
    while (request := pipe.recv_bytes()) != b"end":
        if request == b"serving":
            pipe.send_bytes(json.dumps([served.version, prints_of(sink.weights)]).encode())
            continue
        try:
            served.handle(json.loads(request))
        except SyncError as error:
            pipe.send_bytes(str(error).encode())
        else:
            pipe.send_bytes(b"")
    served.close()
