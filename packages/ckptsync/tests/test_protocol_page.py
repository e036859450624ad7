"""What docs/sync-protocol.md says, held against the code."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from offbeat_ckptsync import errors
from offbeat_ckptsync import values as types
from offbeat_ckptsync.ends.receiver import TRANSITIONS, State
from offbeat_ckptsync.toolkit.ops import MEMBER_OPS, SOURCE_OPS

PAGE = (Path(__file__).parents[3] / "docs" / "sync-protocol.md").read_text()


def rows(heading):
    """Return the cells of the first table after a line that begins with `heading`."""
    after = PAGE[PAGE.index(heading) :]
    table = re.search(r"(?:^\|.*\n)+", after, re.MULTILINE)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_the_states_are_those_of_the_code():
    told = {}
    for state, steps in rows("## 4. States"):
        for step, after in re.findall(r"(\w+) -> (\w+)", re.sub(r"\([^)]*\)", "", steps)):
            told[state, step] = after
    assert told == {(str(state), str(step)): str(after) for (state, step), after in TRANSITIONS.items()}
    assert {state for state, _ in rows("## 4. States")} == set(State)


def test_the_operations_are_those_of_the_table():
    table = {**MEMBER_OPS, **SOURCE_OPS}
    told = {re.match(r"`(\w+)`", op)[1]: (request, answer) for op, request, answer in rows("**Requests.**")}
    assert told.keys() - {"ping"} == table.keys()
    for name, op in table.items():
        request, answer = (re.findall(r"`(\w+)`", re.sub(r":.*", "", cell)) for cell in told[name])
        assert request == list(op.takes), name
        assert answer == ([] if op.gives is None else [op.gives[0]]), name


def test_the_fields_of_values_are_those_of_the_code():
    figures = {"Echo": {"transfer_s", "digest_s", "num_bytes", "wire_bytes"}, "Sent": set()}
    told = dict(rows("## 2. Values"))
    for name, cells in told.items():
        name = name.strip("`")
        kind = getattr(types, name)
        rows_of = {*getattr(kind, "_fields", ())}
        fields = rows_of or {item.name for item in dataclasses.fields(kind)} - figures.get(name, set())
        if kind is types.Sent:
            fields = {"version", "manifest_digest", "bucket_digests", "num_bytes"}
        cells = re.sub(r"\([^)]*\)", "", cells)
        assert set(re.findall(r"`(\w+)`", cells)) == fields, name


def test_the_errors_are_those_of_the_code():
    told = {name.strip("`") for name, *_ in rows("## 8. Errors")}
    there = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert told == there - {
        "SyncError",
        "PlanError",
    }  # the root, and a mistake of a caller that never travels
