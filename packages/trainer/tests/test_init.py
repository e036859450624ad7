import subprocess
import sys
from types import ModuleType

import offbeat_trainer


def test_every_public_name_is_there_and_in_no_module_of_its_name():
    """Importing a submodule sets it as the package's attribute, and a lazy name would silently change."""
    assert len(set(offbeat_trainer.__all__)) == len(offbeat_trainer.__all__) > 0
    assert set(offbeat_trainer.__all__) <= set(dir(offbeat_trainer))
    for name in offbeat_trainer.__all__:
        assert not isinstance(getattr(offbeat_trainer, name), ModuleType), name


def test_importing_is_cheap():
    heavy = "{'torch', 'ray', 'vllm', 'rich', 'numpy', 'tensorboard', 'wandb', 'trackio'}"
    code = f"import sys, offbeat_trainer; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True
    )
    assert done.stdout.strip() == "[]"
