"""A task of one's own: the digits of a number in rising order, `4172=` is `:1247`.

offbeat train task=examples/sort_digits.py:SortDigits model.path=FOLDER
offbeat train task=examples/sort_digits.py:SortDigits model.path=FOLDER "task.text=Sort the digits of {digits}, after a colon."
"""

from dataclasses import dataclass

from offbeat_engine import bounded
from offbeat_recipes import GeneratedConfig, GeneratedTask


@dataclass(frozen=True, slots=True, kw_only=True)
class SortDigitsConfig(GeneratedConfig):
    """`text` is what is asked, with `{digits}` for the digits, of which there are `num_digits`."""

    text: str = "{digits}="
    num_digits: int = bounded(4, at_least=2, at_most=9)


class SortDigits(GeneratedTask):
    """1 for the sorted digits behind the last colon."""

    Config = SortDigitsConfig

    def ask(self, rng):
        """Return the question, and the digits for `reward`."""
        digits = "".join(map(str, rng.integers(1, 10, self.config.num_digits)))
        return self.config.text.format(digits=digits), {"digits": digits}

    def reward(self, completion, data):
        """Return 1 for the right order."""
        return float(completion.rpartition(":")[2].strip() == "".join(sorted(data["digits"])))

    def answer(self, prompt):
        """Return the right answer, for a warm-up or offbeat sft: a task need not have one."""
        return ":" + "".join(sorted(prompt.data["digits"]))
