"""Where the two sides of a sync meet: a store of the source's, at which every receiving rank says a word and hears one.

Words are signed (docs/sync-protocol.md, section 7). One with another proof counts as not there: who reaches the port without the
secret can disturb a sync, and takes no part in it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
import time
from typing import TYPE_CHECKING, Any

from offbeat_ckptsync.errors import TransferError
from offbeat_ckptsync.store import Store, is_loopback
from offbeat_ckptsync.transports.topology import here

if TYPE_CHECKING:
    from offbeat_ckptsync.config import SyncConfig
    from offbeat_ckptsync.values import RankId, SyncOffer

Word = dict[str, Any]
"""What a side says; a rank's has "num_ranks" of its member."""

_TICK_S = 0.1  # how soon a waiting side notices an abort


class Rendezvous:
    """Either side's way to the source's store. `name` is the transport's; see above for `asked` and `told`."""

    def __init__(
        self, name: str, config: SyncConfig, *, asked: str, told: str, beside: Rendezvous | None = None
    ) -> None:
        """Serve nothing yet; a source will, on `config.host`, or meets at the store that `beside` serves."""
        self._name = name
        self._host = config.host
        self._secret = config.secret
        self._asked = asked
        self._told = told
        self._beside = beside
        self._lock = threading.Lock()
        self._served: Store | None = None
        self._joined: dict[tuple[str, int], Store] = {}
        # Kept: a wait of a sync that is over may look only after the next one has begun.
        self._aborted: set[str] = set()

    @property
    def store(self) -> Store:
        """The source's own."""
        if self._beside is not None:
            return self._beside.store
        assert self._served is not None, "`open` comes first"
        return self._served

    def open(self, *, keep: str = "") -> dict[str, str | int | float]:
        """Host the store (once), forget what earlier syncs left there but for keys under `keep`, and say where it is."""
        with self._lock:
            if self._served is None:
                self._served = Store.serve(self._host)
            self._served.clear(keep)
        place = here("cpu")
        return {
            "host": self._served.host,
            "port": self._served.port,
            "machine": place.loopback,
            "hostname": place.hostname,
        }

    def call_roll(self, offer: SyncOffer, members: list[str]) -> dict[str, list[Word]]:
        """Wait for the word of every rank of every member; in rank order, by member.

        Raises:
            TransferError: not all answered within the offer's `rendezvous_s`, or it was aborted; names who is missing.
        """
        timeout_s = float(offer.endpoint["rendezvous_s"])
        deadline = time.monotonic() + timeout_s
        words: dict[str, Word] = {}

        def wait(rank_ids: list[tuple[str, int]]) -> None:
            keys = {self._key(offer, member, rank): f"rank {rank} of {member}" for member, rank in rank_ids}
            words.update(self._wait(self.store, offer, list(keys), deadline))
            if missing := [self._named(keys[key], key) for key in keys if key not in words]:
                cause = "aborted" if self.is_aborted(offer.sync_id) else f"no answer within {timeout_s:g} s"
                raise TransferError(f"{self._name}: {cause} at the roll call; missing: {', '.join(missing)}")

        def ranks(member: str) -> range:
            return range(int(words[self._key(offer, member, 0)]["num_ranks"]))

        wait([(member, 0) for member in members])
        wait([(member, rank) for member in members for rank in ranks(member)])
        return {
            member: [words[self._key(offer, member, rank)] for rank in ranks(member)] for member in members
        }

    def tell(self, offer: SyncOffer, word: Word) -> None:
        """Say the source's word to all ranks."""
        self._write(self.store, f"{offer.sync_id}/{self._told}", word)

    def answer(self, offer: SyncOffer, rank_id: RankId, word: Word) -> None:
        """Say a rank's word.

        Raises:
            TransferError: the store is not there, or on loopback of another machine.
        """
        key = self._key(offer, rank_id.member, rank_id.rank)
        self._write(self.source_store(offer, rank_id), key, {"num_ranks": rank_id.num_ranks, **word})

    def hear(self, offer: SyncOffer, rank_id: RankId) -> Word:
        """Wait for the source's word; raises `TransferError` where none comes in time."""
        timeout_s = float(offer.endpoint["rendezvous_s"])
        key, store = f"{offer.sync_id}/{self._told}", self.source_store(offer, rank_id)
        words = self._wait(store, offer, [key], time.monotonic() + timeout_s)
        if key in words:
            return words[key]
        if self.is_aborted(offer.sync_id):
            raise TransferError(
                f"{self._name}: {rank_id} waited for the source's word, and the sync was aborted"
            )
        forged = "what is there was written without our secret" if store.get(key) is not None else ""
        raise TransferError(
            f"{self._name}: {rank_id} waited {timeout_s:g} s for the source's word; "
            f"{forged or 'a member is missing'}"
        )

    def source_store(self, offer: SyncOffer, rank_id: RankId) -> Store:
        """Return this rank's connection to the source's store; raises as `answer` does."""
        where = (str(offer.endpoint["host"]), int(offer.endpoint["port"]))
        self._require_reachable(offer, rank_id)
        if where not in self._joined:
            self._joined = {where: Store.join(*where, float(offer.endpoint["rendezvous_s"]))}
        return self._joined[where]

    def private(self, text: str) -> str:
        """Return a name made of `text` that nobody can tell without the secret."""
        return self._proof(f"private {text}")

    def abort(self, sync_id: str) -> None:
        """End the waits of `sync_id` here."""
        with self._lock:
            self._aborted.add(sync_id)
            self._joined = {}  # a connection that was cut does not mend: the next sync makes a new one

    def is_aborted(self, sync_id: str) -> bool:
        """Say whether `abort` was called for this sync."""
        return sync_id in self._aborted

    def close(self) -> None:
        """Leave the stores."""
        self._served = None
        self._joined.clear()

    def _key(self, offer: SyncOffer, member: str, rank: int) -> str:
        return f"{offer.sync_id}/{self._asked}/{member}/{rank}"

    def _require_reachable(self, offer: SyncOffer, rank_id: RankId) -> None:
        """Loopback of another machine is nobody, or somebody else."""
        place = here("cpu")
        own = place.loopback
        if is_loopback(str(offer.endpoint["host"])) and offer.endpoint.get("machine", own) != own:
            raise TransferError(
                f"{self._name}: the source listens on loopback, but {rank_id} is on another machine "
                f"({place.hostname}; the source is on {offer.endpoint['hostname']}): let `host` of the source's settings "
                "be an address of its machine that all members reach"
            )

    def _named(self, who: str, key: str) -> str:
        return f"{who} (it answered without our secret)" if self.store.get(key) is not None else who

    def _write(self, store: Store, key: str, word: Word) -> None:
        store.set(key, json.dumps({"word": word, "proof": self._proof(_signed_text(key, word))}))

    def _wait(self, store: Store, offer: SyncOffer, keys: list[str], deadline: float) -> dict[str, Word]:
        """Return the proven words under `keys`, all of them unless the time is over; none once the sync was aborted.

        A source that stood still may say a word before it hears of the abort: nobody comes where that leads.
        """
        words: dict[str, Word] = {}
        for key in keys:
            while key not in words:
                left_s = deadline - time.monotonic()
                text = store.get(key, min(max(left_s, 0.0), _TICK_S))
                if self.is_aborted(offer.sync_id):
                    return {}
                if text is not None and (word := self._proven(key, text)) is not None:
                    words[key] = word
                elif left_s <= 0:
                    break
                elif text is not None:  # without our secret: the right one may still come
                    time.sleep(_TICK_S)
        return words

    def _proven(self, key: str, text: str) -> Word | None:
        try:
            told: Word = json.loads(text)
            word, proof = told["word"], str(told["proof"])
        except (ValueError, KeyError, TypeError):
            return None
        return (
            word
            if hmac.compare_digest(proof.encode(), self._proof(_signed_text(key, word)).encode())
            else None
        )

    def _proof(self, text: str) -> str:
        return hmac.digest(self._secret.encode(), text.encode(), hashlib.sha256).hex()


def _signed_text(key: str, word: Word) -> str:
    return f"{key} {json.dumps(word, sort_keys=True, separators=(',', ':'))}"
