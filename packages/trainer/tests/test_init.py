import subprocess
import sys
from importlib import import_module

import offbeat_trainer


def test_every_public_name_is_there_and_listed_once():
    assert sorted(offbeat_trainer._HOMES) == sorted(offbeat_trainer.__all__)
    for name, home in offbeat_trainer._HOMES.items():
        assert getattr(offbeat_trainer, name) is getattr(import_module(f"offbeat_trainer.{home}"), name)


def test_no_public_name_hides_behind_a_module_of_that_name():
    """Importing a submodule sets it as the package's attribute, and a lazy name would silently change."""
    assert not {home.split(".")[0] for home in offbeat_trainer._HOMES.values()} & set(offbeat_trainer.__all__)


def test_importing_is_cheap():
    heavy = "{'torch', 'ray', 'vllm', 'rich', 'numpy', 'tensorboard', 'wandb', 'trackio'}"
    code = f"import sys, offbeat_trainer; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True
    )
    assert done.stdout.strip() == "[]"
