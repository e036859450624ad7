"""`.ci/run` runs tools/test of the commit, in a folder like those that people have, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.spawns

ROOT = Path(__file__).resolve().parents[2]
# Takes the place of the real one, which is under test itself in every run of CI.
TOOLS_TEST = """\
#!/usr/bin/env bash
cd "$(dirname "${BASH_SOURCE[0]}")/.."
printf '%s\\n' "$PWD" "$(cat said)" "$CI" "$(wc -c)" "$#" "$@" "=== 1 failed ==="
exit 3
"""


def git(folder: Path, *words: str) -> None:
    author = {
        f"GIT_{who}_{what}": "ci@offbeat" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    subprocess.run(["git", *words], cwd=folder, env={**os.environ, **author}, check=True)


@pytest.fixture
def repository(tmp_path):
    """A repository with CI's script as it is here, a commit, and a change that is not committed."""
    root = tmp_path / "checkout"
    for folder in (".ci", "tools"):
        (root / folder).mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", root / ".ci" / "run")
    (root / "tools" / "test").write_text(TOOLS_TEST)
    (root / "tools" / "test").chmod(0o755)
    (root / "said").write_text("committed\n")
    git(root, "init", "--quiet")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "first")
    git(root, "checkout", "--quiet", "--detach")  # as CI does
    (root / "said").write_text("not committed\n")
    return root


def test_ci_runs_the_commit_in_a_folder_that_is_called_offbeat(repository):
    ran = subprocess.run(
        ["bash", ".ci/run", "--fast", "a package"],
        cwd=repository,
        input="typed",
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    where, *said = ran.stdout.splitlines()
    clone = Path(where)
    assert clone.name == "offbeat"
    assert clone.is_relative_to(repository), "on the file system of the checkout"
    assert " " in clone.parent.name
    assert not clone.parent.name.isascii()
    assert said == ["committed", "true", "0", "2", "--fast", "a package", "=== 1 failed ==="]
    assert ran.stderr == ""
    assert ran.returncode == 3
    assert list((repository / "build").iterdir()) == []
