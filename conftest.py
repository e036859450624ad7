"""What every test run shares: one token for its Rays, and a skip, with a reason, where GPUs are missing."""

from __future__ import annotations

import os
import secrets

import pytest

# Ray takes its mode once per process, when it is imported: all processes of a test run agree before any of them does.
# Workers of pytest inherit the token; each Ray on its own would write one to the home folder, where two might meet.
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_AUTH_MODE", "token")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Turn the marker `gpu(n)` into a skip on machines with fewer than n GPUs."""
    marked = [(item, marker) for item in items for marker in item.iter_markers("gpu")]
    if not marked:
        return
    import torch

    there = torch.cuda.device_count()
    for item, marker in marked:
        needed = int(marker.args[0]) if marker.args else 1
        if there < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), this machine has {there}"))
