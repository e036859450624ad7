"""Names on the Hugging Face hub where settings take a path: what its cache on this machine holds stands for them. Nothing is fetched."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from offbeat_recipes.tasks.config import HUB_ROWS, ROW_FILES, RowsConfig

if TYPE_CHECKING:
    from offbeat_recipes.settings.tree import RunConfig

_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_ROWS = re.compile(
    rf"{HUB_ROWS}(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?(?:(?:/(?P<config>[\w.-]+))?:(?P<split>\w+)|/(?P<file>.+))"
)
_SPLIT = re.compile(r"(?P<split>[a-z]\w*)(-\d+-of-\d+(-\w+)?)?\.(parquet|jsonl|json|csv)")
"""The name of a file of a split, as the hub's own programs write them."""


def localized(config: RunConfig) -> RunConfig:
    """Return `config` with the folders of this machine in place of names: of the model, of other models and of rows."""
    task, algorithm = config.task, config.algorithm
    if isinstance(task, RowsConfig):
        task = replace(task, **{key: _local(getattr(task, key)) for key in ROW_FILES})
    roles = [item.name for item in fields(algorithm) if item.name.endswith("_path")]
    return replace(
        config,
        model=replace(config.model, path=local_model(config.model.path)),
        algorithm=replace(algorithm, **{name: local_model(getattr(algorithm, name)) for name in roles}),
        reward=replace(config.reward, model=local_model(config.reward.model)),
        task=task,
    )


def _local(given: str | tuple[str, ...]) -> str | tuple[str, ...]:
    return local_rows(given) if isinstance(given, str) else tuple(map(local_rows, given))


def local_model(path: str) -> str:
    """Return the folder of the model that `path` names as "owner/name" or "owner/name@revision"; `path` itself where it is not cached.

    The folder is that of one commit, so that a run whose settings hold it is always of the same weights.
    """
    named = _NAME.fullmatch(path)
    if named is None or Path(path).exists():
        return path
    return _snapshot(named, "model") or path


def local_rows(path: str) -> str:
    """Return where the rows lie that `path` names as "hf://datasets/owner/name[@revision]/file"; `path` itself where they are not cached.

    The file may be a pattern ("data/train-*.parquet"), or a split, "hf://datasets/owner/name[/config]:train". As with models, the
    folder is that of one commit.
    """
    named = _ROWS.fullmatch(path)
    folder = "" if named is None else _snapshot(named, "dataset")
    if named is None or not folder:
        return path
    if not named["split"]:
        return f"{folder}/{named['file']}"
    of_split = [found for found, split in _splits(folder, named["config"] or "") if split == named["split"]]
    return of_split[0] if len(of_split) == 1 else path


def _splits(folder: str, config: str = "") -> list[tuple[str, str]]:
    """Return the splits of a dataset by how its files are called, each as a pattern of these and its name."""
    found: dict[tuple[str, str], None] = {}
    for file in sorted(Path(folder).rglob("*")):
        name = _SPLIT.fullmatch(file.name)
        if name and config in ("", *file.relative_to(folder).parts[:-1]):
            found[f"{file.parent}/{name['split']}[-.]*", name["split"]] = None
    return [*found]


def _snapshot(named: re.Match[str], kind: str) -> str:
    """Return the folder of a commit in the hub's cache, or nothing where it is not there."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    find = cast("Any", huggingface_hub).snapshot_download
    try:
        return str(find(named["repo"], revision=named["revision"], repo_type=kind, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):  # the latter: what the hub takes for no name
        return ""


def absent_model(path: str) -> tuple[str, str]:
    """Return why `path` is no model, and what to do."""
    named = _NAME.fullmatch(path)
    if named is None or Path(path).exists():
        return (
            f"{path} holds no config.json",
            "name a Hugging Face folder, or a model of the hub as owner/name",
        )
    reason = f"{path} is no folder here, and no model in the hub's cache of this machine"
    return reason, f"`{_fetching(named)}` fetches it; a run does not"


def absent_rows(path: str) -> tuple[str, str]:
    """Return why there are no rows at `path`, and what to do."""
    named = _ROWS.fullmatch(path)
    if named is None:
        known = _NAME.fullmatch(path) and f", or one of a data set of the hub as {HUB_ROWS}{path}/FILE"
        return f"no file {path}", f"name a JSONL, parquet or CSV file that is there{known or ''}"
    folder = _snapshot(named, "dataset") if named["split"] else ""
    if folder:
        splits = [f"{Path(found).parent.relative_to(folder)}:{split}" for found, split in _splits(folder)]
        has = ", ".join(splits).replace(".:", ":") or "no files of rows"
        return f"{path} is not one split", f"of config and split it has {has}"
    fetching = f"`{_fetching(named, ' --repo-type dataset')}` fetches the data set; a run does not"
    return f"no file {path} in the hub's cache of this machine", fetching


def _fetching(named: re.Match[str], kind: str = "") -> str:
    revision = f" --revision {named['revision']}" if named["revision"] else ""
    return f"hf download{kind} {named['repo']}{revision}"
