"""What this machine must have before anything is started on it: looked at here, so that no library hangs for the lack of it.

Whether the weights of a run are numbers, before processes load them: NaN and infinity spread to every answer.
"""

from __future__ import annotations

import os
import re
import resource
import socket
import tempfile
from difflib import get_close_matches
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat_engine.config import Refusal
from offbeat_engine.toolkit.hf.weight_files import WeightFiles
from offbeat_recipes.planning.algorithm import algorithm_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from offbeat_recipes.settings.tree import RunConfig


REPORTERS = "offbeat.reporters"
_TRACKERS = {"tensorboard": "tensorboard", "wandb": "wandb", "wandb_online": "wandb", "trackio": "trackio"}
"""The trackers that the trainer brings, with the package that each needs."""
OPEN_FILES = 1024
"""A driver of one rank and one replica was seen with 300, its Ray with 200; more of either take more."""
SOCKET_PATH_BYTES = 107  # unix(7): 108 with the zero at the end
_CONNECT_S = 10.0
# Of a socket in Python's temporary folder: "/pymp-abcdefgh/listener-abcdefgh".
_OF_A_SOCKET = 32


def machine_refusals(config: RunConfig) -> Iterator[Refusal]:
    """Refuse what cannot be started here. Opens and closes sockets of this machine, and makes and removes an empty folder; asks nobody else."""
    yield from tracker_refusals(config.report.trackers)
    yield from _loopback()
    if not config.cluster.ray_address:
        yield from _rendezvous(config.cluster.rendezvous_host)
    yield from _temporary_folder()
    yield from _run_folder(config.folder)
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if allowed != resource.RLIM_INFINITY and allowed < OPEN_FILES:
        yield Refusal(
            "machine",
            f"a process may open {allowed} files; Ray, gloo and the replicas take more",
            f"raise the limit (ulimit -n {OPEN_FILES} at least)",
        )


def kept_prompts(tracker: str) -> int | None:
    """Return of how many prompts a step `tracker` keeps trajectories, 0 for all; None: it keeps none."""
    match = re.fullmatch(r"trajectories(?:_([1-9]\d*))?", tracker)
    return None if match is None else int(match[1] or 0)


def tracker_refusals(names: Iterable[str]) -> Iterator[Refusal]:
    """Refuse trackers that nobody knows, or whose package is not installed."""
    installed = {point.name for point in entry_points(group=REPORTERS)}
    for name in names:
        package = _TRACKERS.get(name)
        if package is not None and find_spec(package) is None:
            yield Refusal(
                "report.trackers",
                f"{name} needs the package {package}, which is not installed",
                f"install `offbeat-trainer[{package}]`, or leave {name} out",
            )
        elif package is None and ":" not in name and name not in installed and kept_prompts(name) is None:
            near = get_close_matches(name, [*_TRACKERS, "trajectories", *installed], n=1)
            yield Refusal(
                "report.trackers",
                f"no tracker named {name!r} is installed" + (f"; did you mean {near[0]!r}?" if near else ""),
                f"name one of {', '.join([*_TRACKERS, 'trajectories', *sorted(installed)])}, or file.py:make; a package adds one through the "
                f"entry-point group {REPORTERS!r}",
            )


def _loopback() -> Iterator[Refusal]:
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=_CONNECT_S),
        ):
            return
    except OSError as error:
        yield Refusal(
            "machine",
            f"it has no loopback: 127.0.0.1 cannot be reached ({error}), where processes of one machine meet",
            "switch it on (ip link set lo up)",
        )


def _rendezvous(host: str) -> Iterator[Refusal]:
    if not host:
        return
    try:
        socket.create_server((host, 0)).close()
    except OSError as error:
        yield Refusal(
            "cluster.rendezvous_host",
            f"{host} is no address of this machine, where all processes are without cluster.ray_address ({error})",
            "leave it empty, or name an address of this machine",
        )


def _run_folder(folder: Path) -> Iterator[Refusal]:
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    try:
        tempfile.TemporaryDirectory(dir=there).cleanup()
    except OSError as error:
        yield Refusal(
            "run_dir",
            f"{folder} cannot be written: no folder can be made in {there} ({error.strerror})",
            "name a folder that you may write to",
        )


def _temporary_folder() -> Iterator[Refusal]:
    folder = tempfile.gettempdir()
    room = SOCKET_PATH_BYTES - _OF_A_SOCKET
    if len(os.fsencode(folder)) > room:
        yield Refusal(
            "machine",
            f"the temporary folder {folder} has a name of {len(os.fsencode(folder))} bytes, and sockets of Unix in it may have "
            f"{SOCKET_PATH_BYTES} with their own",
            f"set TMPDIR to one of at most {room} bytes, say TMPDIR=/tmp",
        )


_MAX_NAMED = 3


def weight_refusals(config: RunConfig, found: Iterable[Refusal]) -> Iterator[Refusal]:
    """Refuse model folders whose weights hold NaN or infinity, those of roles too, unless `found` refuses a folder already."""
    if any(one.setting in ("model.path", "algorithm") for one in found):
        return
    own = [] if config.model.random_init else [("", config.model.path)]
    roles = [(name, spec.path) for name, spec in algorithm_of(config).roles().items()]
    for name, path in (*own, *roles):
        odd = _odd_weights(Path(path)) if path else ""
        if odd:
            yield Refusal(
                "algorithm" if name else "model.path",
                f"{f'its {name}, {path}: ' if name else ''}weights hold NaN or infinity: {odd}",
                "copy or download them again, or use those of a run that had not gone astray",
            )


def _odd_weights(folder: Path) -> str:
    files = WeightFiles.find(folder)
    odd = {} if files is None else files.non_finite()
    named = [f"`{name}` in {file.name}" for name, file in odd.items()]
    more = [f"and {len(named) - _MAX_NAMED} more"] if len(named) > _MAX_NAMED else []
    return ", ".join([*named[:_MAX_NAMED], *more])
