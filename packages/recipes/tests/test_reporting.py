"""A run reports where its settings say."""

import sys

import pytest

from offbeat_recipes.errors import SettingError
from offbeat_recipes.planning.machine import kept_prompts, tracker_refusals
from offbeat_recipes.run.folder import open_run_folder
from offbeat_recipes.run.reporting import make_reporter
from offbeat_recipes.settings.reading import parse, to_dict
from offbeat_trainer.errors import TrainerError
from offbeat_trainer.watch.console import ConsoleReporter
from offbeat_trainer.watch.fanout import FanOut
from offbeat_trainer.watch.jsonl import JsonlReporter, Silent, TrajectoryReporter
from offbeat_trainer.watch.trackers import TensorBoardReporter


@pytest.fixture
def folder(tmp_path):
    folder = open_run_folder(tmp_path / "run", to_dict(parse({})), resume=False)
    yield folder
    folder.close()


@pytest.mark.parametrize(
    ("report", "kinds"),
    [
        ({"console": False, "trackers": []}, [JsonlReporter]),
        ({"console": True, "trackers": []}, [JsonlReporter, ConsoleReporter]),
        ({"console": False, "trackers": ["tensorboard"]}, [JsonlReporter, TensorBoardReporter]),
        ({"console": False, "trackers": ["trajectories"]}, [JsonlReporter, TrajectoryReporter]),
        ({"console": False, "trackers": ["trajectories_2"]}, [JsonlReporter, TrajectoryReporter]),
    ],
)
def test_a_run_reports_where_the_settings_say_and_always_to_its_folder(folder, report, kinds):
    jsonl = JsonlReporter(folder.path)
    reporter = make_reporter(parse({"report": report}), jsonl, folder)
    assert isinstance(reporter, FanOut)
    assert [type(one) for one in reporter._reporters] == kinds
    assert reporter._reporters[0] is jsonl
    assert (folder.path / "tensorboard").exists() == ("tensorboard" in report["trackers"])
    assert (folder.path / "trajectories").exists() == (TrajectoryReporter in kinds)
    reporter.close()


@pytest.mark.parametrize(
    ("tracker", "kept"),
    [("trajectories", 0), ("trajectories_12", 12), ("trajectories_0", None), ("trajectories_all", None)],
)
def test_trajectories_of_so_many_prompts_are_kept(folder, tracker, kept):
    assert kept_prompts(tracker) == kept
    refusals = [str(one) for one in tracker_refusals([tracker])]
    assert len(refusals) == (kept is None)
    assert all("no tracker named" in one and "'trajectories'" in one for one in refusals)


@pytest.mark.parametrize(("console", "kind"), [(True, ConsoleReporter), (False, Silent)])
def test_looking_at_a_run_writes_nothing_into_its_folder(folder, console, kind):
    before = sorted(folder.path.rglob("*"))
    reporter = make_reporter(parse({"report": {"console": console}}), None, folder)
    assert type(reporter) is kind
    reporter.close()
    assert sorted(folder.path.rglob("*")) == before


def test_a_tracker_of_anybodys_is_told_where_who_and_with_which_settings(folder, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from scripted import Recorder\n"
        "def tracker(folder, name, settings):\n"
        "    made = Recorder()\n"
        "    made.told = folder, name, settings\n"
        "    return made\n"
    )
    config = parse({"report": {"console": False, "trackers": [f"{tmp_path}/mine.py:tracker"]}})
    jsonl = JsonlReporter(folder.path)
    reporter = make_reporter(config, jsonl, folder)
    path, name, settings = reporter._reporters[-1].told
    assert (path, name, settings["seed"]) == (folder.path, config.name, config.seed)
    reporter.close()
    trackio = parse({"report": {"console": False, "trackers": ["trackio"]}})
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(TrainerError, match=r"offbeat-trainer\[trackio\]"):
        make_reporter(trackio, jsonl, folder)
    unknown = parse({"report": {"console": False, "trackers": ["mlflow"]}})
    with pytest.raises(
        SettingError, match=r"report\.trackers: no tracker named 'mlflow' .*offbeat\.reporters"
    ):
        make_reporter(unknown, jsonl, folder)
