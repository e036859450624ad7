"""The values ckptsync hands out. All are plain, so that they cross a wire as JSON (no pickle)."""

from __future__ import annotations

from collections.abc import Sequence  # noqa: TC003 -- the wire reads these annotations at run time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Phase(StrEnum):
    """Where a sync stands; a failure names one of these."""

    BEGIN = "begin"
    TRANSFER = "transfer"
    VERIFY = "verify"
    FLIP = "flip"
    COMMIT = "commit"


class TensorSpec(NamedTuple):
    """One tensor of a manifest. `dtype` is the torch name without its prefix, say "bfloat16".

    A tuple, as `Piece` is: there are tens of thousands, and more.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a version consists of: ordered specs. Order matters; `digest` covers names, shapes, dtypes and order."""

    specs: tuple[TensorSpec, ...]
    digest: str  # xxh3-128, hex, of the canonical JSON of `specs`

    def __hash__(self) -> int:
        """Hash the digest: thousands of specs are not gone through for every plan that is looked up."""
        return hash(self.digest)


class Piece(NamedTuple):
    """A run of bytes of one tensor inside one bucket; a tensor larger than a bucket has several."""

    spec_index: int
    tensor_offset: int
    bucket_offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One buffer on the wire."""

    index: int
    num_bytes: int
    pieces: Sequence[Piece]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankId:
    """One receiving rank: rank `rank` of the `num_ranks` ranks of member `member`."""

    member: str
    rank: int = 0
    num_ranks: int = 1

    def __str__(self) -> str:
        """As messages call it."""
        return f"rank {self.rank} of {self.member}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """Who takes part and what it is: `role` is "member", "source" or "member+source".

    `host` and `port` are where it listens, where it is reached so.
    """

    name: str
    role: str
    host: str = ""
    port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncOffer:
    """What the source proposes: everything a receiver needs to refuse or to receive.

    `endpoint` is the transport's own rendezvous data (strings and numbers only). It always holds `timeout_s`, the
    deadline of a wait for bytes, and `rendezvous_s`, the deadline of a wait for the other side.

    `endpoints` is empty, and all ranks meet one sender at `endpoint`; or it says of every rank (by "member/rank") where it
    meets the sender that is beside it.
    """

    sync_id: str
    version: int
    manifest: Manifest
    bucket_bytes: int
    transport: str
    endpoint: dict[str, str | int | float]
    reload: bool = False  # a member whose content is not trusted takes the version it serves once more
    endpoints: dict[str, dict[str, str | int | float]] = field(
        default_factory=dict[str, "dict[str, str | int | float]"]
    )
    silent_s: float = 0.0  # of the manager, after which a member gives up; 0: it waits for ever


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A version and the content behind it; the two are never seen apart.

    `content_digest` is the xxh3-128, in hex, of the canonical JSON of [manifest_digest, bucket_bytes, bucket_digests].
    """

    version: int
    manifest_digest: str
    content_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What a member serves. `label` is None while it serves what it was started with: nobody vouched for that."""

    version: int
    label: Label | None
    committed: bool  # the manager said that `label` stands, so it may have traffic
    state: str  # of its state machine, the least ready of its ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """What one rank of one member staged: proof to be compared with what was sent."""

    member: str
    rank: int
    version: int
    manifest_digest: str
    bucket_digests: tuple[str, ...]  # xxh3-128, hex, one per bucket, of the bytes that arrived
    transfer_s: float = 0.0
    digest_s: float = 0.0
    num_bytes: int = 0  # of the buckets that this rank took
    wire_bytes: int = 0  # that it brought to its machine: 0 where somebody else had
    num_ranks: int = 1  # of the member


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What the source sent."""

    version: int
    manifest_digest: str
    bucket_digests: tuple[str, ...]
    num_bytes: int
    gather_s: float
    pack_s: float
    wire_s: float  # of the sending thread; overlaps with gathering and packing
    digest_s: float = 0.0  # of all packing threads; a part of their time
    send_s: float = 0.0  # from the first tensor asked for to the last bucket gone
    transport: str = ""  # the transport picked for this sync, where one was picked
    why: str = ""  # and the reason
    wire_bytes: int = 0  # what left for each rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """How one member changed over: the pause is what its users felt."""

    member: str
    version: int
    pause_s: float
    load_s: float
    drain_s: float = 0.0  # the part of the pause until no forward pass ran any more
    gap_s: float | None = (
        None  # between two tokens, the longest from `begin` on; None: no request was seen under way
    )
    has_canary: bool = True  # whether it answers a canary: who has none is not asked


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """One sync in figures.

    `begin_s` .. `commit_s` are walls on the manager's clock and sum to `total_s`. `phases` says the same more finely,
    in seconds of wall time that sum to `total_s`; work that is hidden behind other work counts for nothing there:

        begin    the offer, and every member's yes where each sender waits for that
        gather   the source waits for its tensors
        pack     it lays them into buckets and digests those
        wire     it waits for buckets to leave
        verify   receivers finish digesting, after the last bucket has left; echoes are compared
        drain    the slowest member's generation comes to rest
        load     its live weights are written
        flip     the rest of its change-over: control calls, resuming
        commit   fencing

    `gather_s`, `pack_s`, `wire_s`, `digest_s` are what each took in its own thread, hidden or not.
    """

    version: int
    transport: str
    num_members: int
    num_tensors: int
    num_buckets: int
    num_bytes: int
    begin_s: float
    transfer_s: float
    verify_s: float
    flip_s: float
    commit_s: float
    total_s: float
    gather_s: float
    pack_s: float
    wire_s: float
    pause_s: float  # the longest of any member
    load_s: float
    gb_per_s: float  # num_bytes / (total_s), 1 GB = 1e9 bytes
    phases: dict[str, float] = field(default_factory=dict[str, float])
    digest_s: float = 0.0  # of the source
    receiver_digest_s: float = 0.0  # of the slowest rank
    limit_gb_per_s: float = 0.0  # of one thread's memcpy, as the manager's process measured it at its start
    fraction_of_limit: float = 0.0
    why: str = ""  # the reason for `transport`, where it was picked for this sync
    members: dict[str, Flip] = field(default_factory=dict[str, Flip])
    fenced: dict[str, str] = field(default_factory=dict[str, str])  # member: why it is no longer one
    left: dict[str, str] = field(default_factory=dict[str, str])  # who went meanwhile: what failed then
    failures: tuple[str, ...] = ()  # of tries before this one
    content_digest: str = ""  # of the label under which this version was committed
    wire_bytes: int = 0  # as in `Sent`; `num_bytes` is the content
    worst_gap_s: float | None = (
        None  # between two tokens of any member, from begin to the first after its flip; see `Flip`
    )
    rank_bytes: dict[str, int] = field(default_factory=dict[str, int])  # content taken, by "member/rank"
    received_bytes: dict[str, int] = field(default_factory=dict[str, int])  # and brought to its machine
