from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def test_the_example_of_the_readme_runs(tmp_path):
    text = (Path(__file__).parents[1] / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(example)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"version 1: 1050624 bytes, pause \d+\.\d ms\n", done.stdout)
