"""`offbeat`, and the settings as it tells them."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat_recipes.cli import main, settings
from offbeat_recipes.settings.described import described, matching
from offbeat_recipes.settings.reading import default_choices, known_paths

TOOL = Path(__file__).parents[4] / "tools" / "make_settings.py"


def test_every_setting_has_a_line_of_help_of_its_own():
    assert [item.path for item in described() if len(item.help) < 8] == []
    first = {item.help: item.path for item in reversed(described())}
    assert [(item.path, first[item.help]) for item in described() if first[item.help] != item.path] == []
    assert set(known_paths(default_choices())) <= {item.path for item in described()}


def test_help_is_what_the_source_says():
    told = {item.path: item for item in described()}
    assert told["warmup.batch_size"].help == "examples of a supervised step"
    assert told["rollout.engine_args"].groups == ("rollout=vllm",)
    assert told["trainer.steps"].values == "int: at least 0"
    assert told["algorithm.advantage"].default == "grpo"


def test_page_is_current(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(sys, "argv", [str(TOOL), "--check"])
    runpy.run_path(str(TOOL), run_name="__main__")
    stale = tmp_path / "settings.md"
    stale.write_text("# Settings\n")
    monkeypatch.setattr(sys, "argv", [str(TOOL), "--check", "--page", str(stale)])
    with pytest.raises(SystemExit, match=r"run tools/make_settings\.py"):
        runpy.run_path(str(TOOL), run_name="__main__")


def test_words_find_by_name_and_help(capsys: pytest.CaptureFixture[str]):
    assert "engine.optimizer.lr" in [item.path for item in matching(["Learning", "rate"])]
    assert settings.main(["learning", "rate"]) == 0
    out = capsys.readouterr().out
    assert "engine.optimizer.lr=1e-06" in out
    assert "trainer.steps" not in out
    assert settings.main(["zebra"]) == 2
    assert "nothing has 'zebra'" in capsys.readouterr().err


def test_explains_one_and_corrects_another(capsys: pytest.CaptureFixture[str]):
    assert settings.main(["--explain", "engine.packing"]) == 0
    assert "may change when a run goes on" in capsys.readouterr().out
    assert settings.main(["--explain", "engine.optimizer.lr"]) == 0
    assert "must stay as it was" in capsys.readouterr().out
    assert settings.main(["--explain", "trainer.step"]) == 2
    assert "did you mean `trainer.steps`?" in capsys.readouterr().err


def test_says_what_the_report_advises_and_where_a_word_alone_leads(capsys: pytest.CaptureFixture[str]):
    assert settings.main(["--explain", "trainer.group_size"]) == 0
    out = capsys.readouterr().out
    assert "completions of a prompt" in out
    assert "  advice   Groups without spread: " in out
    assert settings.main(["--explain", "tensorboard"]) == 2
    assert "`offbeat settings tensorboard` lists what has that word" in capsys.readouterr().err


def test_program_says_what_it_can(capsys: pytest.CaptureFixture[str]):
    assert main.main([]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in ("train", "plan", "eval", "sft", "settings"))
    assert main.main(["trian"]) == 2
    assert "did you mean 'train'?" in capsys.readouterr().err
    assert main.main(["zebra"]) == 2
    assert "expected one of train" in capsys.readouterr().err


def test_program_hands_the_rest_on(capsys: pytest.CaptureFixture[str]):
    assert main.main(["plan", "trainer.updates_per_step=3"]) == 2
    assert "trainer.updates_per_step" in capsys.readouterr().out


def test_help_and_settings_need_no_torch():
    code = (
        "import sys; from offbeat_recipes.cli.main import main; main(['settings', 'rate']); "
        "sys.exit(bool({'torch', 'hydra', 'ray'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_settings_of_one_run_stay_few():
    assert len(known_paths(default_choices())) <= 140
