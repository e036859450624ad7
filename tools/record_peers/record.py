"""Record what other libraries compute, as fixtures that ours are compared with.

TRL, verl and NeMo-RL are no dependencies of ours: each is run in an environment of its own, by hand.

    uv run --no-project --python 3.11 --with trl==1.16.0 tools/record_peers/record.py trl
    uv run --no-project --python 3.11 --with verl==0.9.1 --with torch tools/record_peers/record.py verl
    git clone https://github.com/NVIDIA-NeMo/RL
    uv run --no-project --python 3.11 --with torch --with pydantic tools/record_peers/record.py nemo-rl --checkout RL

Every number comes out of the library's own code. The fixture says which version; for NeMo-RL the
commits, and a hash of each definition without its comments and docstrings.

A fixture holds `inputs`, all that may be read, and `cases`: what the library was told (`theirs`), which inputs matter (`reads`), and
what came out: `advantages`, `returns`, `loss`, `gradient` with respect to the log-probs, `value_loss`, `value_gradient`.

Everything is float64.
"""

# What another library's code takes and gives has no types here.
# pyright: basic, reportAttributeAccessIssue=false, reportAssignmentType=false, reportArgumentType=false

from __future__ import annotations

import argparse
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from common import SEED, inputs

FIXTURES = Path(__file__).parents[2] / "packages/trainer/tests/algorithms/fixtures"


def plain(value: Any) -> Any:  # noqa: ANN401 what JSON takes
    """Return tensors as lists of numbers of ten digits."""
    if isinstance(value, torch.Tensor):
        return plain(value.detach().tolist())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return float(f"{value:.10g}") if isinstance(value, float) else value


PEERS = {
    "trl": ("trl-1.16", "of_trl"),
    "verl": ("verl-0.9", "of_verl"),
    "nemo-rl": ("nemo-rl-006907a", "of_nemo_rl"),
}


def main() -> None:
    """Write the fixture of one library."""
    made = argparse.ArgumentParser(description="Record what TRL, verl or NeMo-RL compute.")
    made.add_argument("peer", choices=PEERS)
    made.add_argument("--checkout", type=Path, default=Path(), help="NeMo-RL's repository")
    options = made.parse_args()
    torch.set_default_dtype(torch.float64)
    name, module = PEERS[options.peer]
    data = inputs()
    made_by, cases = import_module(module).cases(data, options.checkout)
    fixture = {"recipe": name, "made_by": made_by, "seed": SEED, "inputs": data, "cases": cases}
    lines = json.dumps(plain(fixture), indent=None, separators=(",", ":")).replace('},"', '},\n"')
    (FIXTURES / f"{name}.json").write_text(lines + "\n", encoding="utf-8")
    print(f"{name}: {len(cases)} cases, {len(lines) / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
