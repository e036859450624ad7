"""An engine of another package: its settings are given, checked, printed and compared as any other are."""

import importlib
import sys
from dataclasses import replace

import pytest
import yaml

from offbeat_recipes.cli._hydra import compose_run, to_yaml
from offbeat_recipes.errors import RunFolderError, SettingError
from offbeat_recipes.planning.facts import gather_facts
from offbeat_recipes.run.folder import open_run_folder
from offbeat_recipes.settings.reading import parse, to_dict

SETTINGS = """
from dataclasses import dataclass, field
from typing import Literal

from offbeat_engine import EngineConfig, bounded


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    depth: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FarConfig(EngineConfig):
    width: int = bounded(3, at_least=1, at_most=9)
    warmth: float = bounded(0.5, more_than=0)
    style: Literal["plain", "fancy"] = "plain"
    inner: Inner = field(default_factory=Inner)
    micro_batch_tokens: int = 77  # the engine's own opinion of a core setting

    @property
    def model_parallel_size(self):
        return self.width

    def __post_init__(self):
        if self.style == "fancy" and self.width < 2:
            raise ValueError("a fancy style needs a width of 2 or more")
"""
POINTS = """
[offbeat.engines]
far = far_engine_that_is_never_imported:Engine
[offbeat.engine_configs]
far = far_settings:FarConfig
"""


@pytest.fixture(autouse=True)
def far(tmp_path, monkeypatch):
    """Install a package that registers the engine `far`; its engine cannot be imported, only its settings."""
    folder = tmp_path / "site"
    about = folder / "far-0.1.dist-info"
    about.mkdir(parents=True)
    (folder / "far_settings.py").write_text(SETTINGS)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: far\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    yield
    from offbeat_recipes.settings import sections

    sections._run_class.cache_clear()
    sys.modules.pop("far_settings", None)


def far_run(*settings):
    return compose_run(["engine.name=far", *settings])


def test_its_settings_are_read_by_its_own_class():
    config = far_run("engine.width=5", "engine.style=fancy", "engine.inner.depth=4", "engine.num_ranks=10")
    told = config.engine_config("m")
    assert (type(told).__name__, told.width, told.style, told.inner.depth) == ("FarConfig", 5, "fancy", 4)
    assert (told.micro_batch_tokens, told.model.path, told.dtype) == (77, "m", "float32")
    assert (config.engine.num_ranks, config.engine.model_parallel_size) == (10, 5)
    assert compose_run(["engine.name=fsdp2"]).engine_config("m").packing is True


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("engine.widht=5", "unknown setting `engine.widht`; did you mean `engine.width`?"),
        ("engine.width=0", "`engine.width`: expected at least 1, got 0"),
        ("engine.width=10", "`engine.width`: expected at most 9, got 10"),
        ("engine.warmth=0.0", "`engine.warmth`: expected more than 0, got 0.0"),
        ("engine.width=wide", "`engine.width`: expected a whole number, got 'wide'"),
        ("engine.style=plian", "`engine.style`: expected 'plain' or 'fancy', got 'plian'; did you mean 'plain'?"),
        ("engine.packing=false", "`engine.packing` belongs to engine=fsdp2 or megatron; this run has engine=far"),
        ("engine.dtype=bfloat16", "`engine.dtype` cannot be set: it follows from model.dtype"),
        ("engine.inner.deep=2", "did you mean `engine.inner.depth`?"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(setting, message):
    with pytest.raises(SettingError) as caught:
        far_run(setting)
    assert message in str(caught.value)


def test_what_its_class_refuses_is_said():
    with pytest.raises(SettingError, match="a fancy style needs a width of 2 or more"):
        far_run("engine.style=fancy", "engine.width=1")


def test_the_usual_engine_has_none_of_them():
    with pytest.raises(
        SettingError, match=r"`engine\.width` belongs to engine=far; this run has engine=fsdp2"
    ):
        compose_run(["engine.width=5"])


def test_an_engine_that_nobody_has_is_refused_with_those_that_are_there():
    with pytest.raises(
        SettingError, match=r"`engine\.name`: no training engine named 'unheard'; installed: far, fsdp2"
    ):
        compose_run(["engine.name=unheard"])
    with pytest.raises(
        SettingError,
        match=r"`rollout\.name`: no rollout adapter named 'unheard'; installed: hf, sglang, vllm",
    ):
        compose_run(["rollout.name=unheard"])


def test_they_are_printed_and_come_back(tmp_path):
    config = far_run("engine.width=5", "engine.inner.depth=4")
    printed = yaml.safe_load(to_yaml(config))
    assert (printed["engine"]["width"], printed["engine"]["inner"]) == (5, {"depth": 4})
    assert "packing" not in printed["engine"]
    assert parse(printed) == config
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert compose_run(["engine.warmth=2.5"], str(tmp_path / "config.yaml")).engine == replace(
        config.engine, warmth=2.5
    )


def test_a_resumed_run_is_compared_in_them(tmp_path):
    open_run_folder(tmp_path / "run", to_dict(far_run("engine.width=5")), resume=False).close()
    with pytest.raises(RunFolderError, match=r"engine\.width: was 5, is 6"):
        open_run_folder(tmp_path / "run", to_dict(far_run("engine.width=6")), resume=True)


ADAPTER = """
from dataclasses import dataclass

from offbeat_rollout import ConfigError, RolloutConfig
from offbeat_rollout.testing import ScriptedRollout


@dataclass(frozen=True, slots=True, kw_only=True)
class ParrotConfig(RolloutConfig):
    colour: str = "grey"
    max_num_seqs: int = 7  # the adapter's own opinion of a core setting


class Parrot(ScriptedRollout):
    Config = ParrotConfig

    @classmethod
    def check(cls, config):
        super().check(config)
        if config.colour == "invisible":
            raise ConfigError("parrot: nobody would hear an invisible one; choose a `colour`")
"""


@pytest.fixture
def parrot(tmp_path, monkeypatch):
    """Install a package that registers the generation adapter `parrot`."""
    folder = tmp_path / "birds"
    about = folder / "parrot-0.1.dist-info"
    about.mkdir(parents=True)
    (folder / "parrot_adapter.py").write_text(ADAPTER)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: parrot\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("[offbeat.rollouts]\nparrot = parrot_adapter:Parrot\n")
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    yield
    sys.modules.pop("parrot_adapter", None)


@pytest.mark.usefixtures("parrot")
def test_an_adapter_of_another_package_has_settings_of_its_own():
    config = compose_run(["rollout.name=parrot", "rollout.colour=green", "rollout.max_model_len=99"])
    told = config.rollout_config("m", num_cores=2)
    assert (type(told).__name__, told.colour, told.max_num_seqs) == ("ParrotConfig", "green", 7)
    assert (told.model_path, told.max_model_len, told.cpu_threads) == ("m", 99, 1)
    assert parse(yaml.safe_load(to_yaml(config))) == config
    for setting, message in (
        ("rollout.color=red", "did you mean `rollout.colour`?"),
        ("rollout.enforce_eager=true", "`rollout.enforce_eager` belongs to rollout=vllm; this run has rollout=parrot"),
        ("rollout.model_path=x", "`rollout.model_path` cannot be set: it follows from model.path"),
    ):  # fmt: skip
        with pytest.raises(SettingError) as caught:
            compose_run(["rollout.name=parrot", setting])
        assert message in str(caught.value)


@pytest.mark.usefixtures("parrot")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["rollout.name=parrot", "rollout.colour=invisible"], "parrot: nobody would hear an invisible one"),
        (["+rollout.engine_args.kv_cach_dtype=fp8"], "did you mean `kv_cache_dtype`"),
        (["rollout.engine_args.max_model_len=5"], "not taken there: set `max_model_len`"),
        (["rollout.engine_args={kv_cache_dtype: auto}"], None),
    ],
)
def test_the_plan_refuses_what_the_adapter_does(settings, message):
    refused = [
        item.reason for item in gather_facts(compose_run(settings)).refusals if item.setting == "rollout"
    ]
    assert len(refused) == (message is not None)
    assert message is None or message in refused[0]


def test_arguments_of_vllm_itself_pass_through():
    config = compose_run(["rollout.engine_args.compilation_config={level: 3}", "rollout.engine_args.seed=4"])
    assert config.rollout_config("m").engine_args == {"compilation_config": {"level": 3}, "seed": 4}
