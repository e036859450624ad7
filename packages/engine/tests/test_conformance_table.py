"""docs/capabilities.md is what the engines declare."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def check(page):
    command = [sys.executable, str(ROOT / "tools" / "make_capabilities.py"), "--check", "--page", str(page)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_the_committed_table_is_current():
    ran = check(ROOT / "docs" / "capabilities.md")
    assert ran.returncode == 0, ran.stderr


def test_a_table_that_says_something_else_is_red(tmp_path):
    page = tmp_path / "capabilities.md"
    page.write_text((ROOT / "docs" / "capabilities.md").read_text().replace("| yes |", "| no |", 1))
    ran = check(page)
    assert ran.returncode == 1
    assert "run tools/make_capabilities.py" in ran.stderr
