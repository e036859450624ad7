"""Importing a package, or its config module, must not load a heavy library.

Reading a config, printing help or asking for a version has to take a fraction of a second; `import torch`
alone takes two. Each module is imported in a fresh interpreter, which then lists what it loaded. The time
is printed for information only: a limit in seconds would depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import cast

HEAVY = (
    "torch",
    "ray",
    "vllm",
    "transformers",
    "hydra",
    "omegaconf",
    "sglang",
    "megatron",
    "tensordict",
    "peft",
    "torchao",
)
DEADLINE_S = 300
PROBE = """
import importlib, json, sys, time
started = time.perf_counter()
found = importlib.import_module(sys.argv[1])
elapsed_s = time.perf_counter() - started
print(json.dumps({"file": found.__file__, "s": elapsed_s, "loaded": [n for n in sys.argv[2:] if n in sys.modules]}))
"""


def modules_of(root: Path) -> list[str]:
    """Return every package of the checkout and its config module or package, where it has one."""
    modules: list[str] = []
    for init in sorted(root.glob("packages/*/src/offbeat_*/__init__.py")):
        home = init.parent
        modules.append(home.name)
        places = [home / "config.py", home / "config" / "__init__.py", home / "toolkit" / "config.py"]
        modules += [
            ".".join(path.relative_to(home.parent).with_suffix("").parts).removesuffix(".__init__")
            for path in places
            if path.is_file()
        ]
    return modules


def complaint(module: str, *, root: Path, python: str, installed: bool) -> str | None:
    """Import `module` in a fresh interpreter; return what is wrong with it, or None.

    With `installed` the module must come from outside `root`; otherwise from its sources.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if not installed:
        environment["PYTHONPATH"] = os.pathsep.join(str(src) for src in sorted(root.glob("packages/*/src")))
    ran = subprocess.run(
        [python, "-P", "-c", PROBE, module, *HEAVY],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if ran.returncode != 0:
        return f"{module}: cannot be imported\n{ran.stderr}"
    answer = cast("dict[str, object]", json.loads(ran.stdout.splitlines()[-1]))
    home = Path(str(answer["file"])).resolve()
    if home.is_relative_to((root / "packages").resolve()) == installed:
        return (
            f"{module}: expected it {'outside' if installed else 'in'} {root / 'packages'}, came from {home}"
        )
    loaded = cast("list[str]", answer["loaded"])
    if loaded:
        return f"{module}: imports {', '.join(loaded)}; import them inside the functions that need them"
    print(f"import {module}: {answer['s']:.2f} s")
    return None


def main() -> None:
    """Check every package under `--root`; exit 1 naming each module that loads a heavy library."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--python", default=sys.executable, help="the interpreter to import in")
    parser.add_argument("--installed", action="store_true", help="expect installed packages, not sources")
    options = parser.parse_args()
    modules = modules_of(options.root)
    if not modules:
        sys.exit(f"{options.root}: no package found; expected packages/*/src/offbeat_*")
    found = [
        complaint(module, root=options.root, python=options.python, installed=options.installed)
        for module in modules
    ]
    complaints = [line for line in found if line is not None]
    if complaints:
        sys.exit("\n".join(complaints))


if __name__ == "__main__":
    main()
