"""Importing this imports the reward functions: done once, in the process that workers are forked from."""

from __future__ import annotations

import os
from contextlib import suppress

from offbeat_trainer.data.loading import load_object
from offbeat_trainer.errors import LoadError
from offbeat_trainer.rollouts.server import FILES

for path in os.environ.get(FILES, "").splitlines():  # noqa: TID251 - set by the server, our parent
    with suppress(LoadError):  # a call says so, by name
        load_object(path)
