"""TRL on the bench's work, in an environment of its own that is made once and kept."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, cast

from runner import BenchError, run_within, tail

if TYPE_CHECKING:
    from ours import Input

HERE = Path(__file__).resolve().parent
TRL = "1.16.0"
ITS_OWN = (f"trl=={TRL}", "datasets==5.2.0", "accelerate==1.15.0")
SHARED = ("torch", "transformers")
WARM_UP = 2
INSTALL_TIMEOUT_S = 1200.0
RUN_TIMEOUT_S = 3600.0


def environment(folder: Path) -> Path:
    """Return the Python of the environment in `folder`, installing it there unless it is there and complete.

    torch and transformers are those of the calling environment: the comparison is of the trainers.

    Raises:
        BenchError: uv is missing, or the installation failed.
    """
    pins = [*ITS_OWN, *(f"{name}=={version(name).partition('+')[0]}" for name in SHARED)]
    python, done = folder / "bin" / "python", folder / "installed.json"
    if done.is_file() and python.exists() and json.loads(done.read_text()) == pins:
        return python
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path.home() / ".local" / "bin"))
    if uv is None:
        raise BenchError("TRL's environment needs uv, which is not on the path; tools/setup installs it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(".log")
    release = f"{sys.version_info.major}.{sys.version_info.minor}"
    with log.open("wb") as output:
        for command in (
            [uv, "venv", "--clear", "--python", release, str(folder)],
            [uv, "pip", "install", "--compile-bytecode", "--python", str(python), *pins],
        ):
            code = run_within(INSTALL_TIMEOUT_S, command, output)
            if code:
                raise BenchError(
                    f"TRL's environment cannot be made: {' '.join(command[1:3])} ended with code {code}. It needs a "
                    f"package registry (or uv's cache) with {', '.join(pins)}.\n{tail(log)}"
                )
    done.write_text(json.dumps(pins))
    return python


def run(python: Path, given: Input, options: dict[str, int], folder: Path) -> dict[str, object]:
    """Train with TRL and return median seconds of a step and of its phases, and the versions.

    Args:
        python: of TRL's environment.
        given: what both sides read.
        options: `steps`, `threads`, `micro_batch` (completions of one backward pass).
        folder: where this run may write.

    Raises:
        BenchError: the trainer failed, or its completions are not as long as the work says.
    """
    folder.mkdir(parents=True)
    answer, asked, log = folder / "answer.json", folder / "options.json", folder / "trl.log"
    asked.write_text(
        json.dumps(
            {
                **options,
                "model": str(given.model),
                "prompts": str(given.prompts),
                "reward": str(HERE / "reward.py"),
                "work": asdict(given.work),
                "scratch": str(folder / "scratch"),
                "answer": str(answer),
            }
        )
    )
    command = [str(python), str(HERE / "trl_step.py"), str(asked)]
    with log.open("wb") as output:
        code = run_within(RUN_TIMEOUT_S, command, output)
    if code:
        raise BenchError(f"TRL ended with code {code}:\n{tail(log)}")
    return _read(answer, given)


def _read(answer: Path, given: Input) -> dict[str, object]:
    got = json.loads(answer.read_text())
    wanted = given.work.completions * given.work.completion_tokens
    tokens = cast("list[int]", got["completion_tokens"])
    if any(count != wanted for count in tokens):
        raise BenchError(f"TRL's steps made {tokens} tokens, the work has {wanted} in each")
    walls = cast("list[float]", got["step_s"])[WARM_UP:-1]
    making = cast("list[float]", got["generate_and_reward_s"])[WARM_UP:-1]
    rest = [wall - part for wall, part in zip(walls, making, strict=True)]
    return {
        "step_s": median(walls),
        "steps": len(walls),
        "phases": {"generate_and_reward": median(making), "train": median(rest)},
        "parameters": got["parameters"],
        "versions": got["versions"],
    }
