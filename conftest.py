"""What every test run shares: tests that need GPUs are skipped, with a reason, where there are fewer."""

from __future__ import annotations

import pytest


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
