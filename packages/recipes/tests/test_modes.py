"""Each mode takes its own settings and no others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import yaml

from offbeat_recipes.cli._hydra import CONF, compose_run, to_yaml
from offbeat_recipes.errors import SettingError
from offbeat_recipes.settings.reading import all_settings, parse
from offbeat_trainer.config import AsyncConfig

if TYPE_CHECKING:
    from pathlib import Path

ALL = {item.path for item in all_settings() if item.path.startswith("mode.") and not item.derived}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["mode.max_staleness=2"], "`mode.max_staleness` belongs to mode=fully_async; this run has mode=sync"),
        (["mode.sync_every=1"], "`mode.sync_every` belongs to mode=fully_async; this run has mode=sync"),
        (["mode.order=first_in"], "belongs to mode=fully_async; this run has mode=sync"),
        (["mode=one_step_off", "mode.partial=keep"], "belongs to mode=fully_async; this run has mode=one_step_off"),
    ],
)  # fmt: skip
def test_a_setting_without_effect_is_refused_with_the_mode_that_takes_it(settings: list[str], message: str):
    with pytest.raises(SettingError) as caught:
        compose_run(settings)
    assert message in str(caught.value)


def test_what_the_loops_are_told():
    assert compose_run([]).asynchrony == AsyncConfig()
    for mode in ("sync", "one_step_off"):
        told = compose_run([f"mode={mode}", "mode.over_sampling=0.5", "reward.max_attempts=6"]).asynchrony
        assert told == AsyncConfig(over_sampling=0.5, max_attempts=7)
    fully = compose_run(["mode=fully_async", "mode.max_staleness=5", "mode.partial=recompute"])
    assert fully.asynchrony == fully.mode
    assert (fully.asynchrony.max_staleness, fully.asynchrony.recompute_kv) == (5, True)


@pytest.mark.parametrize("mode", ["sync", "one_step_off"])
def test_a_mode_undoes_the_settings_it_does_not_take(mode: str):
    """Laid over the settings of another run; see `offbeat-train --config`."""
    undone = {f"mode.{key}" for key, value in yaml.safe_load((CONF / f"mode/{mode}.yaml").read_text()).items() if value is None}  # fmt: skip
    mine = {item.path for item in all_settings() if item.path.startswith("mode.") and item.variant == mode}
    assert undone == ALL - mine


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "fully_async"])
def test_the_settings_of_a_run_come_back_in_any_mode(tmp_path: Path, mode: str):
    written = tmp_path / "config.yaml"
    written.write_text(to_yaml(compose_run(["mode=fully_async", "mode.max_staleness=3"])))
    read = compose_run([f"mode={mode}"], str(written))
    assert read.mode.name == mode
    assert parse(yaml.safe_load(to_yaml(read))) == read
    assert read.asynchrony.max_staleness == (3 if mode == "fully_async" else AsyncConfig().max_staleness)
