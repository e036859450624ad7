"""The example of the README does what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def test_the_example_runs_and_says_what_it_promises(capsys: pytest.CaptureFixture[str]):
    readme = Path(__file__).parents[1].joinpath("README.md").read_text("utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    prompts, worked, plan, error = capsys.readouterr().out.splitlines()
    assert len(re.findall(r"'\d\d\+\d\d='", prompts)) == 4
    assert re.fullmatch(r"[\d+=,]+:\d+", worked)
    assert plan == "64 ()"
    assert error == "unknown setting `trainer.stpes`; did you mean `trainer.steps`?"
