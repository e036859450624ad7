"""For tests: fakes that satisfy the seams, faults to plant, and the contract that every transport must hold.

A package with a transport of its own, named in the entry-point group `offbeat.transports`, runs the contract with

    test_contract = transport_contract("its-name")
"""

from __future__ import annotations

from offbeat_ckptsync.testing.contract import CASES, Case, check_case, check_transport, transport_contract
from offbeat_ckptsync.testing.fakes import (
    DictSource,
    Fault,
    FaultyTransport,
    LocalSync,
    assert_same,
    awkward_weights,
    prints_of,
)

__all__ = [
    "CASES",
    "Case",
    "DictSource",
    "Fault",
    "FaultyTransport",
    "LocalSync",
    "assert_same",
    "awkward_weights",
    "check_case",
    "check_transport",
    "prints_of",
    "transport_contract",
]
