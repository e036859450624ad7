"""uv.lock and tools/sglang.lock name no address and pin every artifact by hash; uv.lock agrees with the pyproject files.

A lock that names the index it was made from works only where that index can be reached. Three sentences are
held: nothing in the file looks like an address, so stripping it once more changes nothing; uv accepts it for
the pyproject files beside it; and what uv exports from it gives a hash for each requirement, which is what
`tools/setup` installs from.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from strip_lock_addresses import strip_addresses

DEADLINE_S = 600
GROUPS = ("dev", "cpu", "gpu")
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|\bgit@")
REQUIREMENT = re.compile(r"^[A-Za-z0-9]\S*==.*?(?=^\S|\Z)", flags=re.MULTILINE | re.DOTALL)


def form_complaints(text: str) -> list[str]:
    """Return one complaint for each line of the lock `text` that names an address."""
    lines = enumerate(text.splitlines(), start=1)
    found = [
        f"uv.lock:{number}: names an address: {line.strip()}"
        for number, line in lines
        if ADDRESS.search(line)
    ]
    if not found and strip_addresses(text) != text:
        found.append("uv.lock: strip_lock_addresses.py would still change it; run tools/lock")
    return found


def sglang_complaints(folder: Path) -> list[str]:
    """Return what is wrong with the pins of SGLang's environment in `folder`: an address, no hash, or another version."""
    text = (folder / "sglang.lock").read_text()
    complaints = [
        f"sglang.lock: names an address: {line}" for line in text.splitlines() if ADDRESS.search(line)
    ]
    pinned = {match.group().split()[0]: match.group() for match in REQUIREMENT.finditer(text)}
    wanted = {line for line in (folder / "sglang.in").read_text().splitlines() if "==" in line}
    complaints += [f"sglang.lock: not what sglang.in says: {name}" for name in sorted(wanted ^ pinned.keys())]
    bare = [f"sglang.lock: no hash for {name}" for name, lines in pinned.items() if "--hash=" not in lines]
    return complaints + bare


def uv(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run uv in `root` and return what it said."""
    return subprocess.run(
        ["uv", *arguments], cwd=root, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def agreement_complaints(root: Path) -> list[str]:
    """Return why uv does not accept the lock for the pyproject files under `root`, if it does not."""
    ran = uv(root, "lock", "--check")
    return (
        []
        if ran.returncode == 0
        else [f"uv lock --check refuses uv.lock; run tools/lock\n{ran.stderr.strip()}"]
    )


def export_complaints(root: Path, group: str) -> list[str]:
    """Return what is wrong with the requirements exported for `group`: none at all, or some without a hash."""
    ran = uv(
        root, "export", "--quiet", "--frozen", "--no-emit-workspace", "--no-default-groups", "--group", group
    )
    if ran.returncode != 0:
        return [f"uv export --group {group} cannot read uv.lock\n{ran.stderr.strip()}"]
    requirements = [match.group() for match in REQUIREMENT.finditer(ran.stdout)]
    if not requirements:
        return [f"uv export --group {group} gives no requirement: uv.lock is empty"]
    bare = [text.splitlines()[0] for text in requirements if "--hash=" not in text]
    return [f"uv.lock: no hash for {requirement}; run tools/lock" for requirement in bare]


def main() -> None:
    """Check uv.lock under `--root`; exit 1 with every complaint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    root: Path = parser.parse_args().root
    complaints = form_complaints((root / "uv.lock").read_text())
    complaints += sglang_complaints(Path(__file__).resolve().parent)
    complaints += agreement_complaints(root)
    for group in GROUPS:
        complaints += export_complaints(root, group)
    if complaints:
        sys.exit("\n".join(complaints))
    print("uv.lock: no address, in step with the pyproject files, every artifact hashed")


if __name__ == "__main__":
    main()
