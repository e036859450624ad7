"""The example of the README is a test: it runs as it stands."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs_and_the_loss_falls(tmp_path, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) == 2
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile("\n".join(blocks), str(README), "exec"), names)
    assert names["own"]["loss_mask"].sum() == 2
    assert names["losses"][-1] < names["losses"][0]
    assert (tmp_path / "trained" / "model.safetensors").is_file()
