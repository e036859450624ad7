"""Where people read: a stream that may go away while the run goes on."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any, TextIO


class Screen:
    """`stream`, but writing never fails: once a terminal, a pipe's reader or the room on a disk is gone, nothing is shown any more.

    Letters that the stream's encoding has not are shown as question marks.
    """

    def __init__(self, stream: TextIO) -> None:
        """Write to `stream`."""
        self._stream = stream

    def write(self, text: str) -> int:
        """Show `text`, if anybody still looks; return its length."""
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding
            self.write(text.encode(encoding, "replace").decode(encoding))
        except (OSError, ValueError):
            self._leave()
        return len(text)

    def flush(self) -> None:
        """Show what was written."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._leave()

    def _leave(self) -> None:
        # What the stream still holds goes nowhere, too: or Python would stumble over it as it exits.
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 whatever the stream has
        return getattr(self._stream, name)
