"""What a run says at its end can be typed as it stands."""

import shlex
import sys
from pathlib import Path

from offbeat_recipes.session import _command


def test_commands_name_the_program_of_this_environment_and_survive_a_shell():
    program, *words = shlex.split(
        _command("python", "--config", "runs/my run/config.yaml", "run_dir=runs/my run")
    )
    assert program == str(Path(sys.executable).parent / "python")
    assert words == ["--config", "runs/my run/config.yaml", "run_dir=runs/my run"]
    assert _command("offbeat-nothing", "x") == "offbeat-nothing x"
