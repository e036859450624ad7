"""What a run says at its end can be typed as it stands."""

import shlex
import sys
from pathlib import Path

import pytest
import torch

from offbeat_recipes.run.session import _command, _out_of_memory
from offbeat_recipes.settings.reading import parse


def test_commands_name_the_program_of_this_environment_and_survive_a_shell():
    program, *words = shlex.split(
        _command("python", "--config", "runs/my run/config.yaml", "run_dir=runs/my run")
    )
    assert program == str(Path(sys.executable).parent / "python")
    assert words == ["--config", "runs/my run/config.yaml", "run_dir=runs/my run"]
    assert _command("offbeat-nothing", "x") == "offbeat-nothing x"


def host_memory() -> Exception:
    """What torch raises where a machine has no more memory: nobody has an exbibyte."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.int8)
    return raised.value


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), MemoryError(), host_memory()],
)
def test_memory_that_ran_out_is_told_with_the_settings_that_take_less(error: Exception):
    error.add_note("in training rank 1")
    said = _out_of_memory(parse({"engine": {"num_ranks": 2, "micro_batch_tokens": 4096}}), error)
    assert said.startswith("memory ran out: ")
    assert "in training rank 1" in said
    for what in (
        "engine.micro_batch_tokens (now 4096)",
        "engine.num_ranks, now 2",
        "engine.offload_optimizer",
    ):
        assert what in said


def test_another_error_is_none_of_memory():
    assert not _out_of_memory(parse({}), RuntimeError("a matrix with no inverse"))
