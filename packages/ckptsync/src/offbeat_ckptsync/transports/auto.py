"""Picks another transport for every sync, by where the ranks are, and says why.

Receiving ranks say at the source's store where they are (`rendezvous.Place`); the source picks when all have, opens that
transport, and answers with its name and endpoint.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING, Literal, cast

from offbeat_ckptsync.errors import TransferError
from offbeat_ckptsync.seams import BucketReceiver, BucketSender, Transport
from offbeat_ckptsync.toolkit.config import SyncConfig, make_transport
from offbeat_ckptsync.toolkit.threads import own_device, use_device
from offbeat_ckptsync.toolkit.wire import decode, encode
from offbeat_ckptsync.transports.rendezvous import Place, Rendezvous, choose, here

if TYPE_CHECKING:
    import torch

    from offbeat_ckptsync.values import RankId, SyncOffer


class AutoTransport(Transport):
    """Picks one for each sync."""

    def __init__(self, config: SyncConfig) -> None:
        """Listen, as a source, on `config.host`; tensors live on `config.device`."""
        self.device = self._device = own_device(config.device)  # payloads' in the sync at hand; tensors'
        self._config = config
        self.rendezvous = Rendezvous("auto", config, asked="place", told="choice")
        self._lock = threading.Lock()
        self._made: dict[tuple[str, str], Transport] = {}
        self._members: dict[str, list[str]] = {}
        # Why syncs go through host memory, once one did: digests there are of another kind than a GPU's, and
        # a joiner that came another way than the group could not reach the group's label.
        self._through_host = ""
        self._staged: dict[
            str, int
        ] = {}  # bytes that receivers hold on their GPUs since the last sync, by rank_id
        # By sync: what was picked, and the offer as it is to see it.
        self._picked: dict[str, tuple[Transport, SyncOffer]] = {}

    def open(self, sync_id: str, members: list[str]) -> dict[str, str | int | float]:
        """Host the store (once) and say where it is."""
        self._members = {sync_id: list(members)}
        endpoint = self.rendezvous.open()
        if self._device == "cpu":
            return endpoint
        free_bytes = 0 if self._through_host else here(self._device).free_bytes
        if free_bytes:  # of the GPU that neighbours share: what they stage in again is not free, and will do
            free_bytes += min((self._staged.get(member, 0) for member in members), default=0)
        return endpoint | {"free_bytes": free_bytes}

    def lend(self, offer: SyncOffer, num_bytes: int) -> torch.Tensor | None:
        """Lend what the picked transport lends, once everybody has said where they are.

        After a sync over `shm` lend a segment at once, so that the weights are copied out before a busy engine has answered:
        whichever transport is picked then can send from there.
        """
        if self._device == "cpu" and self.chosen[0] == "shm":
            transport, picked = self._opened(offer, "shm", "cpu")
        else:
            transport, picked = self._pick(offer, num_bytes)
        return transport.lend(picked, num_bytes)

    def sender(self, offer: SyncOffer, members: list[str]) -> BucketSender:
        """As the picked transport."""
        transport, picked = self._picked.get(offer.sync_id) or self._pick(offer, 0)
        return transport.sender(picked, members)

    def receiver(self, offer: SyncOffer, rank_id: RankId) -> BucketReceiver:
        """Say where this rank is, wait for the source's pick, and go there."""
        place = here(self._device)
        place = dataclasses.replace(place, free_bytes=place.free_bytes + self.spare_bytes)
        self.rendezvous.answer(offer, rank_id, {"place": encode(place)})
        told = self.rendezvous.hear(offer, rank_id)
        endpoint = cast("dict[str, str | int | float]", told["endpoint"])
        transport = self._take(offer, str(told["transport"]), str(told["device"]))
        return transport.receiver(_offer_for(offer, str(told["transport"]), endpoint), rank_id)

    def abort(self, sync_id: str) -> None:
        """End the waits of `sync_id` here, in the picked transport too."""
        self._staged = {}  # nobody knows
        self.rendezvous.abort(sync_id)
        with self._lock:
            made = [*self._made.values()]
        for transport in made:
            transport.abort(sync_id)

    def trim(self) -> None:
        """As everything that was picked."""
        for transport in self._made.values():
            transport.trim()

    def close(self) -> None:
        """Close everything that was picked, and leave the stores."""
        for transport in self._made.values():
            transport.close()
        self._made.clear()
        self.rendezvous.close()

    def _pick(self, offer: SyncOffer, num_bytes: int) -> tuple[Transport, SyncOffer]:
        members = self._members.get(offer.sync_id)
        assert members is not None, "`open` comes first"
        roll = self.rendezvous.call_roll(offer, members)
        places = {
            (member, rank): decode(Place, word["place"])
            for member, words in roll.items()
            for rank, word in enumerate(words)
        }
        if (
            room := offer.endpoint.get("room_bytes")
        ) is not None:  # of several senders, all of which are to pick alike
            places = {
                rank_id: dataclasses.replace(place, free_bytes=int(room)) for rank_id, place in places.items()
            }
        named = {f"rank {rank} of {member}": place for (member, rank), place in places.items()}
        device = "cpu" if self._through_host else self._device
        choice = choose(here(self._device), named, device=device, num_bytes=num_bytes)
        if self._through_host:
            choice = dataclasses.replace(
                choice, why=f"{choice.why}; through host memory since {self._through_host}"
            )
        elif choice.device == "cpu" and self._device != "cpu":
            self._through_host = choice.why
        self._staged = dict.fromkeys(members, num_bytes if choice.device != "cpu" else 0)
        transport, picked = self._opened(offer, choice.transport, choice.device)
        self._picked = {offer.sync_id: (transport, picked)}
        self.chosen = (choice.transport, choice.why)
        told = {"transport": choice.transport, "device": choice.device, "endpoint": picked.endpoint}
        self.rendezvous.tell(offer, told)
        return transport, picked

    def _opened(self, offer: SyncOffer, name: str, device: str) -> tuple[Transport, SyncOffer]:
        """Return a transport that is ready to send to the members of `offer`, and the offer as it is to see it."""
        transport = self._take(offer, name, device)
        endpoint = transport.open(offer.sync_id, self._members[offer.sync_id])
        return transport, _offer_for(offer, name, endpoint)

    def _take(self, offer: SyncOffer, name: str, device: str) -> Transport:
        """Return what is picked for `offer`, and be as it is in this sync."""
        with self._lock:
            if (name, device) not in self._made:
                kind: Literal["cpu", "cuda"] = "cpu" if device == "cpu" else "cuda"
                self._made[name, device] = make_transport(
                    name, dataclasses.replace(self._config, device=kind)
                )
            picked = self._made[name, device]
        if self.rendezvous.is_aborted(offer.sync_id):  # before it was made, so it has not heard of that
            raise TransferError(f"auto: sync {offer.sync_id} was aborted")
        use_device(picked.device)
        self.device = picked.device
        return picked


def _offer_for(offer: SyncOffer, transport: str, endpoint: dict[str, str | int | float]) -> SyncOffer:
    limits = {name: offer.endpoint[name] for name in ("timeout_s", "rendezvous_s")}
    return dataclasses.replace(offer, transport=transport, endpoint={**endpoint, **limits})
