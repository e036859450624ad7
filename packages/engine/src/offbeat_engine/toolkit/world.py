"""Who the ranks are and how they reach each other: the only place that touches the default process group."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from offbeat_engine.errors import StateError

_GLOO = "GLOO_SOCKET_IFNAME"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux, see netdevice(7)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubGroup:
    """Some of the ranks, and this rank's place among them; what `World.split` returns."""

    rank: int
    size: int
    group: dist.ProcessGroup


# The control group, and the default group it was made beside: `leave` and a new `join` leave an old one behind.
_control: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
# The groups that `split` made, beside the default group of then, by what it was called with.
_splits: tuple[dist.ProcessGroup, dict[tuple[int, int, float], SubGroup]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One process's place among the ranks of a training group.

    `device` is where this rank computes ("cpu" or "cuda"); with "cuda" the rank uses `cuda:<local_rank>`. `timeout_s`
    bounds every wait for a control message of another rank (see `control_group`).
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: str = "cpu"
    timeout_s: float = 600.0
    group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)  # see `apart`

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
            store_address: `host:port` that rank 0 can bind, or has a `TCPStore` at, and the others can reach; gloo listens on the interface by which a
                rank reaches it, unless `GLOO_SOCKET_IFNAME` says otherwise.
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
        _let_gloo_use_the_way_to(host, int(port))
        try:
            store = _store(host, int(port), rank, size, timeout)
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
        return cls(rank=rank, size=size, local_rank=local_rank, device=device, timeout_s=timeout_s)

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
        if self.device == "cuda":
            torch.cuda.set_device(self.local_rank)  # FSDP's mesh takes the current one
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=timeout_s)
        )

    def control_group(self) -> dist.ProcessGroup:
        """Return the gloo group of all ranks that control messages go through; the first call is a collective.

        It is another group than the one that moves tensors, also where that one is gloo: a message is not lined up
        behind a tensor, and its deadline (`timeout_s`) aborts no process. One thread of each rank may use it.

        Raises:
            StateError: `join` was not called.
        """
        global _control
        if self.group is not None:
            return self.group
        self.ensure_group(self.timeout_s)
        default = dist.group.WORLD
        assert default is not None
        if _control is None or _control[0] is not default:
            _control = (default, self._new_gloo_group(self.timeout_s))
        return _control[1]

    def apart(self, timeout_s: float) -> World:
        """Return this world with control messages in a group of its own, until `rejoin`; a collective.

        For work in another thread, or with waits too long for the deadline of the others.
        """
        if self.size == 1:
            return replace(self, timeout_s=timeout_s)
        return replace(self, timeout_s=timeout_s, group=self._new_gloo_group(timeout_s))

    def rejoin(self) -> None:
        """Give up the group that `apart` made."""
        if self.group is not None and dist.is_initialized():  # `leave` has ended all groups
            dist.destroy_process_group(self.group)

    def _new_gloo_group(self, timeout_s: float) -> dist.ProcessGroup:
        self.ensure_group(self.timeout_s)
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        assert isinstance(group, dist.ProcessGroup)
        return group

    def split(self, size: int, timeout_s: float, stride: int = 1) -> SubGroup:
        """Split the ranks into groups of `size` ranks that lie `stride` apart; return this rank's group.

        A collective: every rank calls it with the same numbers, at the same place. Of 4 ranks, `split(2)` makes
        {0, 1} and {2, 3}, `split(2, stride=2)` makes {0, 2} and {1, 3}. No wait inside a group exceeds `timeout_s`.
        The same numbers give the same group again: engines in one process share it, whose communicator takes device
        memory with NCCL, and a thread that wakes a hundred times a second with gloo.

        Raises:
            StateError: the ranks do not come out even, or `join` was not called.
        """
        if size < 1 or stride < 1 or self.size % (size * stride):
            raise StateError(f"{self.size} ranks cannot be split into groups of {size}, {stride} apart")
        global _splits
        self.ensure_group(timeout_s)
        default = dist.group.WORLD
        assert default is not None
        if _splits is None or _splits[0] is not default:
            _splits = (default, {})
        made = _splits[1]
        if (size, stride, timeout_s) not in made:
            made[size, stride, timeout_s] = self._split(size, timeout_s, stride)
        return made[size, stride, timeout_s]

    def _split(self, size: int, timeout_s: float, stride: int) -> SubGroup:
        timeout = timedelta(seconds=timeout_s)
        mine: SubGroup | None = None
        for start in range(self.size):
            if start // stride % size:
                continue
            ranks = list(range(start, start + size * stride, stride))
            # Every rank takes part in making every group: torch asks for that, members or not.
            group = dist.new_group(ranks, timeout=timeout)
            if self.rank in ranks:
                assert isinstance(group, dist.ProcessGroup)
                mine = SubGroup(rank=ranks.index(self.rank), size=size, group=group)
        assert mine is not None
        return mine

    def leave(self) -> None:
        """Leave the process group, if one was joined."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _store(host: str, port: int, rank: int, size: int, timeout: timedelta) -> dist.TCPStore:
    """Return the store by which ranks meet; rank 0's listens at `host` alone, where torch's own listens on every interface."""
    listener: int | None = None
    if rank == 0:
        # This process has a store there already, or nobody can listen there, which the store says.
        with suppress(OSError):
            listener = socket.create_server((host, port)).detach()
    # With several tenants, one that this process has opened at that port already is the one.
    return dist.TCPStore(
        host, port, size, is_master=rank == 0, timeout=timeout, multi_tenant=True, master_listen_fd=listener
    )


def _let_gloo_use_the_way_to(host: str, port: int) -> None:
    """Let gloo's groups of this process listen on the interface by which `host` is reached, unless somebody has said which.

    Of itself gloo takes the address that the machine's own name leads to, often loopback, which ranks elsewhere cannot reach.
    It reads this from the environment whenever a group is made, and there is no option for it. On loopback nothing is changed,
    nor over IPv6.
    """
    address = _own_address(host, port)
    if _GLOO in os.environ or not address or ipaddress.ip_address(address).is_loopback:  # noqa: TID251 -- see above
        return
    if name := _interface_with(address):
        os.environ[_GLOO] = name  # noqa: TID251 -- as above


def _own_address(host: str, port: int) -> str:
    """Return the IPv4 address of this machine from which `host` is reached, or nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing: the kernel only chooses the way
            return str(probe.getsockname()[0])
    except OSError:
        return ""  # meeting there will say what is wrong


def _interface_with(address: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                told = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()))
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(told[20:24]) == address:
                return name
    return ""
