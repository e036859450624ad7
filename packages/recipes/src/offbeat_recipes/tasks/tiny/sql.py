"""Questions to a small database: the policy asks in SQL, reads the rows or the error, and says the answer.

    prompt        max r<50?
    policy        select max(n)from t where k='r'and n<50    database  47;
    policy        :47                                        right

The table `t` has a key `k`, a letter, and a number `n`. The database is SQLite's, in memory, and can only be read. The reward is exact and looks
at the answer alone, what stands after the `:`. The careless hand leaves the condition out.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any, cast

from offbeat_recipes.tasks.chars import CharTask
from offbeat_rollout import Finish
from offbeat_trainer import Action, Feedback, Prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from offbeat_recipes.tasks.chars import Past

    Rows = Sequence[tuple[str, int]]

RESULT, SHOWN_END, FAILED = ":", ";", "!"
MAX_SHOWN = 20
"""Characters of rows or of an error that are shown."""
_WORKED_OUT: dict[str, Callable[[Sequence[int]], int]] = {"count": len, "max": max, "min": min, "sum": sum}
_FUNCTIONS = {*_WORKED_OUT, "avg", "abs", "total"}
_MAX_ROWS, _MAX_STEPS, _STEPS_PER_CALL = 4, 100_000, 1000
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 1000, sqlite3.SQLITE_LIMIT_SQL_LENGTH: 200, sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 20,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 4, sqlite3.SQLITE_LIMIT_ATTACHED: 0,
}  # fmt: skip


def query(rows: Rows, sql: str) -> str:
    """Return what `sql` finds in a table `t(k, n)` of `rows`, at most `_MAX_ROWS`, or `!` and why it cannot be done.

    It reads that table and nothing else, with a few functions, in at most `_MAX_STEPS` steps of SQLite's machine: no clock decides.
    """
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
        database.execute("create table t(k text, n int)")
        database.executemany("insert into t values(?, ?)", rows)
        for limit, most in _LIMITS.items():
            database.setlimit(limit, most)
        calls = iter(range(_MAX_STEPS // _STEPS_PER_CALL))
        database.set_progress_handler(lambda: next(calls, None) is None, _STEPS_PER_CALL)
        database.set_authorizer(_allowed)
        try:
            found = database.execute(sql).fetchmany(_MAX_ROWS)
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            return f"{FAILED}{error}".lower()
    return "|".join(",".join("null" if one is None else str(one) for one in row) for row in found)


def _allowed(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    reads = action == sqlite3.SQLITE_SELECT or (action == sqlite3.SQLITE_READ and first == "t")
    calls = action == sqlite3.SQLITE_FUNCTION and second in _FUNCTIONS
    return sqlite3.SQLITE_OK if reads or calls else sqlite3.SQLITE_DENY


class Database:
    """The environment: it answers queries, and compares the answer."""

    def reset(self, prompt: Prompt, seed: int) -> str:
        """Begin with `prompt`."""
        del seed
        self._rows, self._answer = cast("Any", prompt.data["rows"]), str(prompt.data["answer"])
        return ""

    def step(self, action: Action) -> Feedback:
        """Return what a query finds, in characters of the task, or whether the answer is right."""
        if action.text.startswith(RESULT):
            right = action.finish == Finish.STOP and action.text == RESULT + self._answer
            return Feedback(reward=float(right), correct=right, done=True)
        shown = "".join(
            one for one in query(self._rows, action.text) if one in SqlTask.alphabet and one != SHOWN_END
        )
        return Feedback(observation=shown[:MAX_SHOWN] + SHOWN_END)


class SqlTask(CharTask):
    """Questions `count`, `max`, `min` or `sum`, of a key, below a bound, each with `config.rows` rows of a table."""

    alphabet = f"{ascii_lowercase}0123456789 ()*<>=',.|_-?{RESULT}{SHOWN_END}{FAILED}"
    environment = Database

    def ask(self, rng: np.random.Generator) -> tuple[str, dict[str, object]]:
        """Draw a question, and rows of which at least one is asked for."""
        function = list(_WORKED_OUT)[int(rng.integers(len(_WORKED_OUT)))]
        keys, bound = rng.choice(list(ascii_lowercase), size=3, replace=False), int(rng.integers(20, 100))
        values = [
            int(rng.integers(10, bound)),
            *map(int, rng.integers(10, 100, size=int(self.config.rows) - 1)),
        ]
        rows = [(str(keys[place and int(rng.integers(len(keys)))]), n) for place, n in enumerate(values)]
        answer = _WORKED_OUT[function]([n for key, n in rows if key == keys[0] and n < bound])
        return f"{function} {keys[0]}<{bound}?", {"rows": rows, "answer": answer}

    def say(self, prompt: Prompt, past: Past, rng: np.random.Generator, *, careless: bool) -> str:
        """Return the query, then the answer that it found."""
        del rng
        if past:
            return RESULT + past[0][1].removesuffix(SHOWN_END)
        function, _, condition = prompt.text.removesuffix("?").partition(" ")
        column = "*" if function == "count" else "n"
        where = "" if careless else f" where k='{condition[0]}'and n{condition[1:]}"
        return f"select {function}({column})from t{where}"

    def lengths(self) -> tuple[int, int]:
        """See `CharTask.lengths`."""
        digits = len(str(99 * self.config.rows))
        return len("count r<50?"), len(
            "select count(*)from t where k='r'and n<50"
        ) + 1 + digits + 1 + 1 + digits + 1
