# pyright: basic
"""A sync in this process over `loopback`, for tests of who drives it."""

from __future__ import annotations

import dataclasses

from offbeat_ckptsync.ends.manifest import manifest_of
from offbeat_ckptsync.testing import (
    DictSource,
    LocalSync,
    awkward_weights,
)
from offbeat_ckptsync.toolkit.config import SyncConfig
from offbeat_ckptsync.transports.loopback import LoopbackTransport
from sync_faults.planted import TornSink

CONFIG = SyncConfig(
    transport="loopback",
    bucket_mib=4096 / (1 << 20),
)


def local_of(sinks, make=LoopbackTransport, source=None, **deadlines):
    config = dataclasses.replace(CONFIG, **deadlines)
    return LocalSync(source or DictSource(awkward_weights(1)), sinks, config, make)


def served(*names, seed):
    sinks = {name: TornSink(manifest_of(awkward_weights(0).items())) for name in names}
    for sink in sinks.values():
        sink.weights = awkward_weights(seed)
    return sinks
