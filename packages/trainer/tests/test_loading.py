"""What users name by its path is an ordinary file or module of theirs."""

import importlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest

from offbeat_trainer.data.loading import load_object, save_object
from offbeat_trainer.errors import LoadError

ORDINARY = """
from __future__ import annotations
from dataclasses import dataclass
import beside_it

@dataclass(frozen=True, slots=True)
class Thing:
    number: int = beside_it.NUMBER
"""


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {*sys.modules}
    yield
    for name in {*sys.modules} - before:
        del sys.modules[name]


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)


def test_a_file_may_hold_dataclasses_and_import_what_lies_beside_it(tmp_path):
    write(tmp_path, thing=ORDINARY, beside_it="NUMBER = 5")
    cls = load_object(f"{tmp_path}/thing.py:Thing")
    assert cls() == cls(5)
    assert pickle.loads(pickle.dumps(cls(3))) == cls(3)
    assert load_object(f"{tmp_path / '..' / tmp_path.name}/thing.py:Thing") is cls


def test_two_files_of_one_name_are_two_modules_and_hide_no_other(tmp_path):
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, json=f"WHO = {folder!r}")
    assert [load_object(f"{tmp_path}/{folder}/json.py:WHO") for folder in ("one", "other")] == [
        "one",
        "other",
    ]
    del sys.modules["json"]
    assert "WHO" not in vars(__import__("json"))


def test_a_module_in_the_working_directory_is_found(tmp_path, monkeypatch):
    write(tmp_path, of_the_users="def answer(): return 42")
    monkeypatch.chdir(tmp_path)
    assert load_object("of_the_users:answer")() == 42


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("thing", "expected package.module:name or file.py:name, got 'thing'"),
        (":thing", "expected package.module:name"),
        ("nowhere_at_all:thing", "cannot import 'nowhere_at_all': ModuleNotFoundError"),
        ("missing.py:thing", "cannot import 'missing.py': FileNotFoundError"),
        ("broken.py:thing", "cannot import 'broken.py': ZeroDivisionError"),
        ("whole.py:thing", "whole.py has no 'thing'"),
    ],
)
def test_what_cannot_be_loaded_is_said(path, words, tmp_path, monkeypatch):
    write(tmp_path, broken="1 / 0", whole="other = 1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LoadError, match=words):
        load_object(path)


ALGORITHM = """
from __future__ import annotations
from dataclasses import dataclass
from offbeat_trainer import AlgorithmConfig, GroupPolicyGradient

@dataclass(frozen=True, slots=True, kw_only=True)
class OwnConfig(AlgorithmConfig):
    sharpness: float = 2.0

class Own(GroupPolicyGradient[OwnConfig]):
    Config = OwnConfig
    def advantages(self, rewards_NG):
        return rewards_NG * self.config.sharpness
    def loss_fn(self):
        return None
"""


@pytest.mark.spawns
def test_an_algorithm_of_a_file_comes_out_of_pickle_where_nobody_imported_it(tmp_path):
    write(tmp_path, own=ALGORITHM)
    cls = load_object(f"{tmp_path}/own.py:Own")
    made = cls(config=cls.Config(sharpness=3.0))
    assert pickle.loads(pickle.dumps(made)) == made
    (tmp_path / "pickled").write_bytes(pickle.dumps(made))
    elsewhere = Path(tmp_path / "elsewhere")
    elsewhere.mkdir()
    code = f"import pickle; print(pickle.load(open({str(tmp_path / 'pickled')!r}, 'rb')).config.sharpness)"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=elsewhere, env=os.environ, capture_output=True, text=True, check=False,
        timeout=600,
    )  # fmt: skip
    assert ran.stdout == "3.0\n", ran.stderr


def test_a_module_of_two_names_is_sent_once(tmp_path, monkeypatch):
    write(tmp_path, twice_named="def half(value):\n    return value / 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("twice_named")
    monkeypatch.setitem(sys.modules, "twice_named.alias", module)
    save_object(lambda value: module.half(value), tmp_path / "reward.pkl")
    assert "twice_named" not in cloudpickle.list_registry_pickle_by_value()
    code = f"from offbeat_trainer.data.loading import load_object; print(load_object({str(tmp_path)!r} + '/reward.pkl:reward')(3))"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=elsewhere, capture_output=True, text=True, check=False, timeout=600
    )
    assert ran.stdout == "1.5\n", ran.stderr
