"""Picks another transport for every sync, by where the ranks are, and says why.

Receiving ranks say at the source's store where they are (`topology.Place`); the source picks when all have, opens that
transport, and answers with its name and endpoint:

    receiver: set <sync>/place/<member>/<rank> = {"num_ranks": .., "place": Place}
    source:   set <sync>/choice = {"transport": name, "device": type, "endpoint": {..}}
"""

from __future__ import annotations

import dataclasses
import json
import threading
from typing import TYPE_CHECKING, Literal, cast

from offbeat_ckptsync.config import make_transport
from offbeat_ckptsync.errors import TransferError
from offbeat_ckptsync.seams import Transport
from offbeat_ckptsync.store import Store
from offbeat_ckptsync.threads import own_device, use_device
from offbeat_ckptsync.transports.roll import answer, call_roll, forget
from offbeat_ckptsync.transports.topology import Place, choose, here
from offbeat_ckptsync.wire import decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from offbeat_ckptsync.config import SyncConfig
    from offbeat_ckptsync.seams import BucketReceiver, BucketSender
    from offbeat_ckptsync.values import Seat, SyncOffer


class AutoTransport(Transport):
    """Picks one for each sync; `make(name)` makes those it picks from."""

    @classmethod
    def from_config(cls, config: SyncConfig) -> AutoTransport:
        """Make the one that a sync of these settings uses."""

        def make(name: str, device: str) -> Transport:
            kind: Literal["cpu", "cuda"] = "cpu" if device == "cpu" else "cuda"
            return make_transport(name, dataclasses.replace(config, device=kind))

        return cls(make, host=config.host, device=config.device)

    def __init__(
        self, make: Callable[[str, str], Transport], *, host: str = "127.0.0.1", device: str = "cpu"
    ) -> None:
        """Listen, as a source, on `host`; tensors live on `device`."""
        self.device = self._device = own_device(device)  # payloads' in the sync at hand; tensors'
        self._make = make
        self._host = host
        self._lock = threading.Lock()
        self._made: dict[tuple[str, str], Transport] = {}
        self._served: Store | None = None
        self._joined: dict[tuple[str, int], Store] = {}
        self._members: dict[str, list[str]] = {}
        # By sync: what was picked, and the offer as it is to see it.
        self._picked: dict[str, tuple[Transport, SyncOffer]] = {}
        # Kept: a wait of a sync that is over may look only after the next one has begun.
        self._aborted: set[str] = set()

    def open(self, sync_id: str, members: list[str]) -> dict[str, str | int | float]:
        """Host the store (once) and say where it is."""
        with self._lock:
            self._members = {sync_id: list(members)}
            if self._served is None:
                self._served = Store.serve(self._host)
            return {"host": self._served.host, "port": self._served.port}

    def lend(self, offer: SyncOffer, num_bytes: int) -> torch.Tensor | None:
        """Wait until everybody has said where they are, pick, and lend what the picked transport lends."""
        transport, picked = self._pick(offer, num_bytes)
        return transport.lend(picked, num_bytes)

    def sender(self, offer: SyncOffer, members: list[str]) -> BucketSender:
        """As the picked transport."""
        transport, picked = self._picked.get(offer.sync_id) or self._pick(offer, 0)
        return transport.sender(picked, members)

    def receiver(self, offer: SyncOffer, seat: Seat) -> BucketReceiver:
        """Say where this rank is, wait for the source's pick, and go there."""
        store = self._store_of(offer)
        answer(store, f"{offer.sync_id}/place/", seat, {"place": encode(here(self._device))})
        timeout_s = float(offer.endpoint["rendezvous_s"])
        key = f"{offer.sync_id}/choice"
        if store.wait([key], timeout_s, lambda: offer.sync_id in self._aborted):
            raise TransferError(
                f"auto: rank {seat.rank} of {seat.member} waited {timeout_s:g} s for the source's choice; a member is "
                "missing or the sync was aborted"
            )
        told = json.loads(store.get(key) or "{}")
        endpoint = cast("dict[str, str | int | float]", told["endpoint"])
        transport = self._take(str(told["transport"]), str(told["device"]))
        return transport.receiver(_offer_for(offer, str(told["transport"]), endpoint), seat)

    def abort(self, sync_id: str) -> None:
        """End the waits of `sync_id` here, in the picked transport too."""
        with self._lock:
            self._aborted.add(sync_id)
            self._joined = {}  # as `broadcast` does: a connection that was cut is not mended
            made = [*self._made.values()]
        for transport in made:
            transport.abort(sync_id)

    def close(self) -> None:
        """Close everything that was picked, and leave the stores."""
        for transport in self._made.values():
            transport.close()
        self._made.clear()
        self._served = None
        self._joined.clear()

    def _pick(self, offer: SyncOffer, num_bytes: int) -> tuple[Transport, SyncOffer]:
        store, members = self._served, self._members.get(offer.sync_id)
        assert store is not None, "`open` comes first"
        assert members is not None, "`open` comes first"
        prefix, timeout_s = f"{offer.sync_id}/place/", float(offer.endpoint["rendezvous_s"])
        try:
            roll = call_roll(store, prefix, members, timeout_s, lambda: offer.sync_id in self._aborted)
        except TransferError as error:
            raise TransferError(f"auto: {error}") from error
        places = {
            (member, rank): decode(Place, word["place"])
            for member, words in roll.items()
            for rank, word in enumerate(words)
        }
        named = {f"rank {rank} of {member}": place for (member, rank), place in places.items()}
        choice = choose(here(self._device), named, device=self._device, num_bytes=num_bytes)
        transport = self._take(choice.transport, choice.device)
        endpoint = transport.open(offer.sync_id, members)
        self._picked = {offer.sync_id: (transport, _offer_for(offer, choice.transport, endpoint))}
        self.chosen = (choice.transport, choice.why)
        told = {"transport": choice.transport, "device": choice.device, "endpoint": endpoint}
        store.set(f"{offer.sync_id}/choice", json.dumps(told))
        forget(store, prefix, [*places])
        return self._picked[offer.sync_id]

    def _take(self, name: str, device: str) -> Transport:
        """Return what is picked, and be as it is in this sync."""
        with self._lock:
            if (name, device) not in self._made:
                self._made[name, device] = self._make(name, device)
            picked = self._made[name, device]
        use_device(picked.device)
        self.device, self.carries_deltas = picked.device, picked.carries_deltas
        return picked

    def _store_of(self, offer: SyncOffer) -> Store:
        where = (str(offer.endpoint["host"]), int(offer.endpoint["port"]))
        if where not in self._joined:
            self._joined = {where: Store.join(*where, float(offer.endpoint["rendezvous_s"]))}
        return self._joined[where]


def _offer_for(offer: SyncOffer, transport: str, endpoint: dict[str, str | int | float]) -> SyncOffer:
    limits = {name: offer.endpoint[name] for name in ("timeout_s", "rendezvous_s")}
    return dataclasses.replace(offer, transport=transport, endpoint={**endpoint, **limits})
