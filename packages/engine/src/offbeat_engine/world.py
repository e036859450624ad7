"""Who the ranks are and how they reach each other: the only place that touches the default process group."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from offbeat_engine.errors import StateError


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One process's place among the ranks of a training group.

    `device` is where this rank computes ("cpu" or "cuda"); with "cuda" the rank uses `cuda:<local_rank>`.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: str = "cpu"

    @classmethod
    def join(
        cls,
        *,
        rank: int,
        size: int,
        store_address: str,
        device: str = "cpu",
        timeout_s: float = 600.0,
        local_rank: int = 0,
    ) -> World:
        """Join the default process group (gloo on CPU, NCCL on GPU) through a TCP store, within a deadline.

        Args:
            rank: this process, 0..size-1; rank 0 hosts the store.
            size: number of processes.
            store_address: `host:port` that rank 0 can bind and the others can reach.
            device: "cpu" or "cuda".
            timeout_s: bound on the rendezvous and on every later collective.
            local_rank: index of this rank's GPU on its host.

        Raises:
            StateError: not all ranks came in time; the message names how many did.
        """
        host, _, port = store_address.rpartition(":")
        timeout = timedelta(seconds=timeout_s)
        if device == "cuda":
            torch.cuda.set_device(local_rank)
        try:
            store = dist.TCPStore(host, int(port), size, is_master=rank == 0, timeout=timeout)
            dist.init_process_group(
                "nccl" if device == "cuda" else "gloo",
                store=store,
                rank=rank,
                world_size=size,
                timeout=timeout,
            )
        except (dist.DistError, RuntimeError, TimeoutError) as error:
            raise StateError(
                f"rank {rank} of {size} could not join the training group at {store_address} within {timeout_s:g} s; "
                f"check that all {size} ranks started and can reach that address ({error})"
            ) from error
        return cls(rank=rank, size=size, local_rank=local_rank, device=device)

    def ensure_group(self, timeout_s: float = 600.0) -> None:
        """Make the default process group exist: for a single rank, make one that needs no address.

        Raises:
            StateError: there are other ranks and `join` was not called.
        """
        if dist.is_initialized():
            return
        if self.size > 1:
            raise StateError(f"rank {self.rank} of {self.size} has no process group; call `World.join` first")
        backend = "nccl" if self.device == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=timeout_s)
        )

    def leave(self) -> None:
        """Leave the process group, if one was joined."""
        if dist.is_initialized():
            dist.destroy_process_group()
