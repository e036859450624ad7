"""Between processes whose GPUs reach each other's memory (or share one GPU): the source exports two buckets of device memory.

The ranks meet the source on its line (`line`), and map its two slots by CUDA's IPC handles. The source copies bucket k
into slot k % 2 once every rank has taken bucket k - 2; ranks copy it into their own staging memory and say so. Copies
are device to device; only words travel over the line:

    receiver: hello, with "has": id of the slots it has mapped, or ""
    source:   {"welcome": id, "slot_bytes": n, "gpu": uuid, "slots": [handle, handle]}; no handles where they are mapped
    source:   {"bucket": k}
    receiver: {"took": k}
"""

# torch's IPC calls are its own private ones: no public way leaves out pickle.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

import torch

from offbeat_ckptsync.ends.buckets import buckets_of
from offbeat_ckptsync.errors import SyncError, TransferError
from offbeat_ckptsync.seams import BucketReceiver, BucketSender
from offbeat_ckptsync.toolkit.threads import own_device
from offbeat_ckptsync.transports.line import Guest, Line, LineTransport, Packet, call
from offbeat_ckptsync.transports.rendezvous import gpu_uuid

if TYPE_CHECKING:
    from offbeat_ckptsync.toolkit.config import SyncConfig
    from offbeat_ckptsync.values import Bucket, RankId, SyncOffer

_NUM_SLOTS = 2


class CudaIpcTransport(LineTransport):
    """Satisfies `Transport` between processes of one machine and user, payloads on GPUs."""

    def __init__(self, config: SyncConfig | None = None) -> None:
        """Hold nothing yet.

        Raises:
            SyncError: torch sees no CUDA device.
        """
        if not torch.cuda.is_available():
            raise SyncError(
                "transport `cuda_ipc` needs a CUDA device and torch sees none; use `shm` or `auto`"
            )
        self.device = own_device("cuda")
        super().__init__(config)
        self._exported: _Slots | None = None
        self._mapped: _Slots | None = None

    def sender(self, offer: SyncOffer, members: list[str]) -> _Sender:
        """Wait for the calls of all ranks and hand them the slots."""
        buckets = buckets_of(offer)
        size = max((bucket.num_bytes for bucket in buckets), default=1)
        if self._exported is None or self._exported.num_bytes != size:
            self._exported = _Slots.make(size, self.device)
        guests = self.meet(offer, members)
        with self._lock:
            self._lines = {offer.sync_id: [guest.line for guest in guests]}
        return _Sender(self, offer, self._exported, guests)

    def receiver(self, offer: SyncOffer, rank_id: RankId) -> _Receiver:
        """Call the source and map its slots, unless they are mapped already."""
        mapped = self._mapped
        about = {"has": mapped.id if mapped else ""}
        line, welcome, _ = call(offer, rank_id, about, lambda: self.is_aborted(offer.sync_id))
        try:
            if mapped is None or mapped.id != welcome["welcome"]:
                mapped = self._mapped = _Slots.of(welcome)
        except BaseException:
            line.close()
            raise
        return _Receiver(self, offer, rank_id, line, mapped)

    def close(self) -> None:
        """Let go of slots and the address."""
        self._exported = self._mapped = None
        super().close()


class _Slots:
    """Device memory of the source, exported or mapped."""

    def __init__(self, slots_id: str, slots: list[torch.Tensor]) -> None:
        self.id = slots_id
        self.slots = slots
        self.num_bytes = slots[0].numel()

    @classmethod
    def make(cls, num_bytes: int, device: str) -> _Slots:
        slots = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(_NUM_SLOTS)]
        return cls(uuid.uuid4().hex, slots)

    @classmethod
    def of(cls, welcome: Packet) -> _Slots:
        """Map what a source exported; raises `TransferError` where its GPU cannot be seen from here."""
        gpu = str(welcome["gpu"])
        index = next((i for i in range(torch.cuda.device_count()) if gpu_uuid(i) == gpu), None)
        if index is None:
            raise TransferError(
                f"cuda_ipc: this process does not see GPU {gpu} of the source; widen CUDA_VISIBLE_DEVICES or use "
                "`broadcast`"
            )
        try:
            slots = [_mapped(handle, index, int(welcome["slot_bytes"])) for handle in welcome["slots"]]
        except RuntimeError as error:
            raise TransferError(f"cuda_ipc: memory of GPU {gpu} cannot be mapped here: {error}") from error
        return cls(str(welcome["welcome"]), slots)

    def handles(self) -> list[list[Any]]:
        """Return fresh handles for one more process: torch counts the users of each."""
        return [_handle(slot) for slot in self.slots]


def _handle(slot: torch.Tensor) -> list[Any]:
    parts = slot.untyped_storage()._share_cuda_()
    return [part.hex() if isinstance(part, bytes) else part for part in parts[1:]]


def _mapped(handle: list[Any], device: int, num_bytes: int) -> torch.Tensor:
    parts = [bytes.fromhex(part) if isinstance(part, str) else part for part in handle]
    storage = torch.UntypedStorage._new_shared_cuda(device, *parts)  # noqa: SLF001 -- as above
    return torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}").set_(storage)[:num_bytes]


class _Sender(BucketSender):
    def __init__(
        self, transport: CudaIpcTransport, offer: SyncOffer, slots: _Slots, guests: list[Guest]
    ) -> None:
        self._transport = transport
        self._offer = offer
        self._slots = slots
        self._guests = guests
        self._num_taken = dict.fromkeys(range(len(guests)), 0)
        self._num_sent = 0
        self._waits_for = ""
        self._deadline = time.monotonic() + float(offer.endpoint["timeout_s"])
        for guest in guests:
            known = guest.hello["has"] == slots.id
            gpu = gpu_uuid(slots.slots[0].device.index)
            welcome = {"welcome": slots.id, "slot_bytes": slots.num_bytes, "gpu": gpu}
            said = {**welcome, "slots": [] if known else slots.handles()}
            guest.say(said, self._deadline, self._what("the welcome"))

    def send(self, bucket: Bucket, payload: torch.Tensor) -> None:
        self._wait_taken(bucket.index + 1 - _NUM_SLOTS)
        self._slots.slots[bucket.index % _NUM_SLOTS][: bucket.num_bytes].copy_(payload)
        torch.cuda.current_stream(payload.device).synchronize()  # other processes know nothing of this stream
        self._num_sent = bucket.index + 1
        for guest in self._guests:
            guest.say({"bucket": bucket.index}, self._deadline, self._what(f"bucket {bucket.index}"))

    def close(self) -> None:
        self._wait_taken(self._num_sent)
        for guest in self._guests:
            guest.line.close()

    def waits_for(self) -> str:
        return self._waits_for

    def _what(self, what: str) -> str:
        return f"cuda_ipc: {what} of version {self._offer.version}"

    def _wait_taken(self, num_buckets: int) -> None:
        for index, guest in enumerate(self._guests):
            what = f"cuda_ipc: {guest.rank_id} has not taken bucket {self._num_taken[index]}"
            self._waits_for = str(guest.rank_id)
            while self._num_taken[index] < num_buckets:
                packet, _ = guest.line.receive(
                    self._deadline, lambda: self._transport.is_aborted(self._offer.sync_id), what
                )
                if packet.get("took") != self._num_taken[index]:
                    raise TransferError(f"{what}: it says {packet}")
                self._num_taken[index] += 1
        self._waits_for = ""


class _Receiver(BucketReceiver):
    def __init__(
        self, transport: CudaIpcTransport, offer: SyncOffer, rank_id: RankId, line: Line, slots: _Slots
    ) -> None:
        self._transport = transport
        self._offer = offer
        self._who = str(rank_id)
        self._line = line
        self._slots = slots
        self._deadline = time.monotonic() + float(offer.endpoint["timeout_s"])

    def receive(self, bucket: Bucket, into: torch.Tensor) -> None:
        what = f"cuda_ipc: {self._who} waits for bucket {bucket.index} of version {self._offer.version}"
        packet, _ = self._line.receive(
            self._deadline, lambda: self._transport.is_aborted(self._offer.sync_id), what
        )
        if packet.get("bucket") != bucket.index:
            raise TransferError(f"{what}: the source says {packet}")
        into.copy_(self._slots.slots[bucket.index % _NUM_SLOTS][: bucket.num_bytes])
        # The slot is written to again after the next line.
        torch.cuda.current_stream(into.device).synchronize()
        try:
            self._line.send({"took": bucket.index}, self._deadline)
        except OSError as error:
            raise TransferError(f"{what}: the source hung up: {error}") from error

    def close(self) -> None:
        self._line.close()
