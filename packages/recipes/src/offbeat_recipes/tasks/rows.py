"""Rows of data files: JSONL, parquet or CSV, by the ending of the name."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import glob
import json
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard, cast

import numpy as np

from offbeat_recipes.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping


class Stream(IntEnum):
    """What random numbers are for: streams of different purposes are independent."""

    PROMPTS = 1
    EXAMPLES = 2
    HELD_OUT = 3


def stream(seed: int, purpose: Stream, step: int = 0) -> np.random.Generator:
    """Return the generator of (seed, purpose, step); the same numbers on every machine (Philox, counter-based)."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, int(purpose), step])))


def epoch_indices(num_rows: int, step: int, num_taken: int, seed: int, purpose: Stream) -> list[int]:
    """Return the rows of `step` when each epoch is a fresh permutation of `num_rows` rows.

    A step lies within one epoch and an epoch holds each row at most once: what does not fill a step is left
    over, another part in each epoch. A pure function of its arguments.
    """
    if not 1 <= num_taken <= num_rows:
        raise ValueError(f"a step takes {num_taken} rows, and there are {num_rows}")
    steps_per_epoch = num_rows // num_taken
    epoch, position = divmod(step, steps_per_epoch)
    order = stream(seed, purpose, epoch).permutation(num_rows)
    return [int(row) for row in order[position * num_taken : (position + 1) * num_taken]]


# pyarrow ships no types; this file is where Offbeat calls it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row: `number` counts from 1 (the line, in JSONL), `values` by column."""

    path: str
    number: int
    values: Mapping[str, object]

    @property
    def place(self) -> str:
        """File and row, for messages."""
        return f"{self.path}, row {self.number}"

    def get(self, key: str) -> object:
        """Return the value of `key`.

        Raises:
            DataError: the row has no such key, or holds null there.
        """
        value = self.values.get(key)
        if value is None:
            if key in self.values:
                raise DataError(f"{self.place}: {key!r} is null; give it a value, or leave the row out")
            has = ", ".join(sorted(self.values)) or "nothing"
            raise DataError(
                f"{self.place}: no {key!r}; it has {has}. task.columns.{key} names another column"
            )
        return value

    def text(self, key: str) -> str:
        """Return the text of `key`.

        Raises:
            DataError: it is missing, no text, or blank.
        """
        value = self.get(key)
        if not is_text(value) or not value.strip():
            raise DataError(f"{self.place}: {key!r} must be text, got {value!r}")
        return value


def is_text(value: object) -> TypeGuard[str]:
    """Say whether `value` is text that a tokenizer takes: JSON can also write half a character, a lone surrogate like U+D83D."""
    try:
        return isinstance(value, str) and bool(value.encode() or not value)
    except UnicodeEncodeError:
        return False


def row_files(path: str) -> list[str]:
    """Return the files that `path` names, in the order of their rows: itself, or those that it is a pattern of."""
    if Path(path).is_file():
        return [path]
    return sorted(found for found in glob.glob(path, recursive=True) if Path(found).is_file())


def read_rows(path: str) -> list[Row]:
    """Return all rows of the JSONL (.jsonl, .json), parquet (.parquet) or CSV (.csv) files that `path` names.

    Raises:
        DataError: no such file, an unknown ending, a line that is not a JSON object, or no rows.
    """
    rows = [row for file in row_files(path) or [path] for row in _read(file)]
    if not rows:
        raise DataError(f"{path}: no rows")
    return rows


def _read(path: str) -> list[Row]:
    if not Path(path).is_file():
        raise DataError(f"no file {path}")
    ending = Path(path).suffix.lower()
    if ending in (".parquet", ".csv"):
        return _read_table(path, ending)
    if ending in (".jsonl", ".json"):
        return _read_jsonl(path)
    raise DataError(
        f"{path}: expected a name that ends in .jsonl, .parquet or .csv, got {ending or 'no ending'}"
    )


def _read_table(path: str, ending: str) -> list[Row]:
    import pyarrow as pa
    import pyarrow.csv as pc
    import pyarrow.parquet as pq

    try:
        table = pc.read_csv(path) if ending == ".csv" else pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a {ending[1:]} file that can be read: {error}") from error
    return [Row(path=path, number=index + 1, values=row) for index, row in enumerate(table.to_pylist())]


def _read_jsonl(path: str) -> list[Row]:
    # Line by line, not by pyarrow: rows may differ in their keys, and an error must name its line.
    rows: list[Row] = []
    with Path(path).open(encoding="utf-8", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            if not is_text(line):  # a byte that is not UTF-8 was read as half a character
                raise DataError(f"{path}, row {number}: not UTF-8; convert the file")
            try:
                values = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}, row {number}: not JSON: {error}") from error
            if not isinstance(values, dict):
                raise DataError(f"{path}, row {number}: expected a JSON object, got {type(values).__name__}")
            rows.append(Row(path=path, number=number, values=cast("dict[str, object]", values)))
    return rows
