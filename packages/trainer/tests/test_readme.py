import re
from pathlib import Path

import pytest


def test_the_example_runs_and_says_what_it_promises(capsys):
    readme = Path(__file__).parents[1].joinpath("README.md").read_text("utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    right, wrong = names["logprobs"].grad[:, 3:].tolist()
    # Advantages +-1/sqrt(2), four tokens: the loss falls as the right answer's log-probabilities rise.
    assert right == pytest.approx([-(0.5**0.5) / 4] * 2, rel=1e-4)
    assert wrong == pytest.approx([0.5**0.5 / 4] * 2, rel=1e-4)
    assert "tensor" in capsys.readouterr().out
