"""Pairs for DPO: sums worked out with their carries are preferred to sums that forget them.

python examples/pairs.py 2000 train.jsonl 256 test.jsonl
"""

import json
import random
import sys
from pathlib import Path

from offbeat_recipes.tasks.arithmetic import worked_answer


def pairs(count: int, draw: random.Random) -> list[dict[str, str]]:
    """Return so many rows, no sum twice; each has a carry, so that its two answers differ."""
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < count:
        left, right = draw.randint(10, 99), draw.randint(10, 99)
        if left % 10 + right % 10 >= 10:
            chosen, rejected = (
                worked_answer(left, right, forgetful=forgetful) for forgetful in (False, True)
            )
            rows[f"{left}+{right}="] = {"prompt": f"{left}+{right}=", "chosen": chosen, "rejected": rejected}
    return list(rows.values())


def main(num_train: int, train: str, num_test: int, test: str) -> None:
    """Write two files that share no sum."""
    rows = pairs(num_train + num_test, random.Random(0))
    for path, some in ((train, rows[:num_train]), (test, rows[num_train:])):
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in some))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
