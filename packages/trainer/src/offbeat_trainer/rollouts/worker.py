"""A process that environments live in, driven over its pipes; `rollouts.frames` says what goes through them.

Coroutine functions share an event loop, each call with a limit of its own. Plain functions run in the main thread, one after the
other, where `signal.alarm` works: the driver asks one thing at a time of such a process, and ends it when that takes too long.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import threading
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from offbeat_trainer.data.loading import load_object
from offbeat_trainer.rollouts.environment import Feedback, check_instance, is_coroutine
from offbeat_trainer.rollouts.frames import LOST, RAISED, TIMED_OUT, Answer, over_there, plain, read_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from offbeat_trainer.rollouts.frames import Call, Setup


class Instances:
    """The environments of this process, by number."""

    def __init__(self, path: str, timeout_s: float, args: Mapping[str, Any] | None = None) -> None:
        """Make them by what `path` names with `args`; a coroutine of theirs may take `timeout_s`."""
        self._path = path
        self._args = args or {}
        self._make: Callable[[], Any] | None = None
        self._timeout_s = timeout_s
        self._there: dict[int, Any] = {}

    def look(self) -> bool:
        """Import what makes them, make one, and say whether it has coroutine functions."""
        made: Any = load_object(self._path)
        self._make = partial(made, **self._args)
        one = self._make()
        check_instance(self._path, one)
        return is_coroutine(one)

    async def answer(self, call: Call) -> Answer:
        """Return what `call` came to; whatever is raised is an answer, too."""
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                value = self._value(call.path, **call.arguments)
                if inspect.isawaitable(value):
                    value = await value
            return Answer(number=call.number, value=plain(value, Feedback))
        except KeyError as error:
            gone = error.args == (call.arguments.get("instance"),)
            return self._failed(call, error, LOST if gone else RAISED)
        except BaseException as error:  # noqa: BLE001 - whatever a user's environment raises
            return self._failed(call, error, TIMED_OUT if limit.expired() else RAISED)

    def _value(self, method: str, instance: int = -1, given: tuple[Any, ...] = ()) -> Any:  # noqa: ANN401 - a user's
        if method == "look":
            return self.look()
        if method == "reset":
            if self._make is None:  # a process that was started for this call
                self.look()
            assert self._make is not None
            self._there[instance] = self._make()
        one = self._there.pop(instance) if method == "close" else self._there[instance]
        return getattr(one, method)(*given) if hasattr(one, method) else None

    def _failed(self, call: Call, error: BaseException, how: str) -> Answer:
        if how == TIMED_OUT:
            detail = f"it took longer than {self._timeout_s:g} s"
        elif how == LOST:
            detail = "the process it lived in was ended, for another one's sake"
        else:
            detail = f"{type(error).__name__}: {error}"
        return Answer(number=call.number, failure=how, detail=detail)


def main() -> None:
    """Serve until the other end is gone. What environments print goes where errors go."""
    incoming, answer = over_there()
    setup: Setup | None = read_frame(incoming)
    if setup is None:
        return
    sys.path += [folder for folder in setup.search if folder not in sys.path]
    instances = Instances(setup.paths[0], setup.timeout_s, setup.args)
    loop = asyncio.new_event_loop()
    threaded = False
    for call in chain.from_iterable(iter(lambda: read_frame(incoming), None)):
        if threaded:
            work = asyncio.run_coroutine_threadsafe(instances.answer(call), loop)
            work.add_done_callback(lambda done: answer([done.result()]))
            continue
        found = loop.run_until_complete(instances.answer(call))
        answer([found])
        if call.path == "look" and found.value is True:
            threaded = True
            threading.Thread(target=loop.run_forever, name="environments", daemon=True).start()
    os._exit(0)  # a coroutine that never ends keeps nobody
