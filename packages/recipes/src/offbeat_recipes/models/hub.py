"""Models by their names on the Hugging Face hub: where the hub's cache of this machine has them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")


def local_model(path: str) -> str:
    """Return the folder of the model that `path` names as "owner/name" or "owner/name@revision"; `path` itself where it is not cached.

    The folder is that of one commit, so that a run whose settings hold it is always of the same weights. Nothing is fetched.
    """
    named = _NAME.fullmatch(path)
    if named is None or Path(path).exists():
        return path
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    find = cast("Any", huggingface_hub).snapshot_download
    try:
        return str(find(named["repo"], revision=named["revision"], local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):  # the latter: what the hub takes for no name
        return path
