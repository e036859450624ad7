"""Labels: which content a version stands for. Two contents never get one label."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import xxhash

from offbeat_ckptsync.errors import VersionError
from offbeat_ckptsync.values import Label

if TYPE_CHECKING:
    from offbeat_ckptsync.values import Sent

_KEPT = 4096


def label_of(sent: Sent, bucket_bytes: int) -> Label:
    """Return the label of what was sent; every rank that staged it computes the same one."""
    row = [sent.manifest_digest, bucket_bytes, list(sent.bucket_digests)]
    content = xxhash.xxh3_128_hexdigest(json.dumps(row, separators=(",", ":")).encode())
    return Label(version=sent.version, manifest_digest=sent.manifest_digest, content_digest=content)


def told(label: Label | None, version: int) -> str:
    """Return a label in words, for messages."""
    return f"version {version} with content {label.content_digest if label else 'nobody vouched for'}"


class LabelBook:
    """Remembers the last few thousand labels and refuses a second content for any of them."""

    def __init__(self) -> None:
        self._labels: dict[int, Label] = {}

    def check(self, label: Label) -> None:
        """Make sure that `label` may be used.

        Raises:
            VersionError: its version stands for another content.
        """
        known = self._labels.get(label.version)
        if known is not None and known != label:
            raise VersionError(
                f"version {label.version} stands for content {known.content_digest} already and cannot be given to "
                f"content {label.content_digest}; publish it under the next version"
            )

    def bind(self, label: Label) -> None:
        """Remember `label` for good; raises as `check`."""
        self.check(label)
        self._labels[label.version] = label
        while len(self._labels) > _KEPT:
            del self._labels[next(iter(self._labels))]
