"""The example of the README runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

from offbeat_rollout import Finish

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [example] = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), flags=re.DOTALL)
    names = {}
    exec(compile(example, str(README), "exec"), names)
    assert names["completion"].num_tokens == 16
    assert names["completion"].finish is Finish.LENGTH
