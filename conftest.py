"""What every test run shares: its tier, one Hypothesis profile, one token for its Rays, and a skip where GPUs are missing."""

from __future__ import annotations

import faulthandler
import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

# Ray takes its mode once per process, when it is imported: all processes of a test run agree before any of them does.
# Workers of pytest inherit the token; each Ray on its own would write one to the home folder, where two might meet.
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_AUTH_MODE", "token")

# `sync_faults` and `scripted`, which tests of several packages share and none ships; processes that they start find them
# by this variable.
SHARED = [
    str(Path(__file__).parent / "packages" / name / "tests" / "shared") for name in ("ckptsync", "trainer")
]
sys.path[:0] = SHARED
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (*SHARED, os.environ.get("PYTHONPATH"))))

# Nothing is timed: on a busy machine an example, or drawing it, may take seconds, and that is no failure. Where examples
# are dear, a test takes a share of these numbers: `settings(max_examples=settings().max_examples // 8)`.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("usual", UNTIMED, max_examples=50)
settings.register_profile("deep", UNTIMED, max_examples=500)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--deep`: the whole of what is otherwise sampled."""
    parser.addoption(
        "--deep", action="store_true", help="tests marked deep too, and full counts in all others"
    )
    parser.addoption(
        "--chains", action="store_true", help="look only into files that name the marks ray or vllm"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Load the profile before modules of tests ask for it."""
    settings.load_profile("deep" if config.getoption("--deep") else "usual")


@pytest.hookimpl(trylast=True)  # after pytest's own, whose reports are lost among thousands of dots
def pytest_sessionstart() -> None:
    """Have a process that crashes say where, in a file that `tools/test` prints at its end."""
    if folder := os.environ.get("OFFBEAT_TEST_FAULTS"):
        # Open to the end of the process, and no file object: nobody would be left to close it.
        faulthandler.enable(os.open(f"{folder}/fault-{os.getpid()}.txt", os.O_CREAT | os.O_WRONLY))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `--chains` leave unread what has none of them: reading all costs each worker ten seconds of a core."""
    if not config.getoption("--chains") or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text(encoding="utf-8")
    return None if "mark.ray" in text or "mark.vllm" in text else True


@pytest.fixture(scope="session")
def deep(request: pytest.FixtureRequest) -> bool:
    """Whether this is the deep tier: for tests that repeat something, and repeat it more often there."""
    return request.config.getoption("--deep")


@pytest.fixture(scope="module", autouse=True)
def _leave_the_group() -> Iterator[None]:
    """An engine of one rank makes a default process group in this process; the next module's tests begin without."""
    yield
    if "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized():
        from offbeat_engine import World

        World().leave()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests marked `deep` to the deep tier, and turn `gpu(n)` and `sglang` into skips where those are missing."""
    if not config.getoption("--deep"):
        left_out = [item for item in items if item.get_closest_marker("deep")]
        items[:] = [item for item in items if not item.get_closest_marker("deep")]
        config.hook.pytest_deselected(items=left_out)
    _skip_without_gpus([(item, marker) for item in items for marker in item.iter_markers("gpu")])
    _skip_without_sglang([item for item in items if item.get_closest_marker("sglang")])


def _skip_without_gpus(marked: list[tuple[pytest.Item, pytest.Mark]]) -> None:
    if not marked:
        return
    import torch

    there = torch.cuda.device_count()
    for item, marker in marked:
        needed = int(marker.args[0]) if marker.args else 1
        if there < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), this machine has {there}"))


def _skip_without_sglang(marked: list[pytest.Item]) -> None:
    if not marked:
        return
    from offbeat_rollout import ConfigError
    from offbeat_rollout.sglang import SglangConfig
    from offbeat_rollout.sglang.arguments import check_arguments

    try:
        check_arguments(SglangConfig(model_path=""))
    except ConfigError as missing:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=str(missing)))
