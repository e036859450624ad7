"""From settings to a run: plan, refuse, and only then start. Imports torch."""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING

from offbeat_recipes.cli import STARTED_S
from offbeat_recipes.cli._environment import (
    open_token,
    prepare_environment,
    private_ray,
    without_collector,
)
from offbeat_recipes.cli._hydra import USAGE, complain
from offbeat_recipes.errors import RecipeError, RunRefused
from offbeat_recipes.planning.facts import gather_facts
from offbeat_recipes.planning.plan import plan_run
from offbeat_trainer.cluster.fork_server import fork_server

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from offbeat_recipes.planning.plan import Plan
    from offbeat_recipes.settings.tree import RunConfig


_NOT_NEEDED = {
    "sft": ("task.reward", "trainer.steps"),
    "sft_by_loss": ("task.reward", "trainer.steps"),
    "evaluate": ("trainer.steps",),
    "hold": ("trainer.steps",),
}
"""What a command can do without, though others refuse to run so."""


def checked(prog: str, config: RunConfig, what: str, *more: object) -> int:
    """Plan `config`; run `offbeat_recipes.run.commands.<what>`, with `more`, if nothing is refused; return the exit code."""

    def run(command: Callable[..., int]) -> int:
        return command(config, STARTED_S, *more)

    try:
        return started(prog, config, what, run)
    except RunRefused as error:
        for refusal in error.refusals:
            sys.stderr.write(f"{prog}: refused: {refusal}\n")
        return USAGE
    except RecipeError as error:
        complain(prog, error)
        return USAGE
    except KeyboardInterrupt:  # a run that has begun takes Ctrl-C itself
        sys.stderr.write(f"{prog}: stopped before anything was started\n")
        return 130


def started(
    prog: str,
    config: RunConfig,
    what: str,
    run: Callable[[Callable[..., int]], int],
    say: Callable[[str], object] = lambda text: sys.stderr.write(text),
) -> int:
    """Plan `config`; if nothing is refused, `run` the command `offbeat_recipes.run.commands.<what>`; return its exit code.

    Notes, as words of `prog`, go to `say`, by default to stderr.

    Raises:
        RunRefused: the plan refuses it; nothing was started.
        RecipeError: the settings, the data or the run folder cannot be used.
    """
    address = config.cluster.ray_address
    prepare_environment(address)
    readable = open_token() if address else None
    if readable is not None:
        say(
            f"{prog}: note: others may read {readable}, and who has that token runs code on the cluster as you: "
            f"chmod 600 {readable}\n"
        )
    with ExitStack() as held:
        with without_collector(), _ctrl_c() as raise_if_pressed:
            if not address and config.device == "cpu":
                held.enter_context(fork_server(_needed_by_workers(config)))
            say(f"{prog}: checking settings, data and model ...\n")  # imports take seconds
            plan = plan_run(config, gather_facts(config))
            raise_if_pressed()
            _require_possible(prog, plan, what, say)
            # Composition brings Ray and the engines: not before everything is known to fit.
            command = getattr(import_module("offbeat_recipes.run.commands"), what)
            raise_if_pressed()
        if not address:
            held.enter_context(private_ray())
        return run(command)


def _needed_by_workers(config: RunConfig) -> list[str]:
    """Return what ranks and replicas import, as far as it can be imported before their environment is known."""
    modules = [
        "transformers.models.auto.modeling_auto",
        "offbeat_trainer.algorithms.learner",
        "offbeat_trainer.cluster.weights",
    ]
    if config.engine.name in ("fsdp2", "megatron"):
        modules.append(f"offbeat_engine.{config.engine.name}.engine")
    if config.rollout.name == "hf":
        modules.append("offbeat_rollout.hf.engine")
    return modules


def _require_possible(prog: str, plan: Plan, what: str, say: Callable[[str], object]) -> None:
    for warning in plan.warnings:
        say(f"{prog}: note: {warning}\n")
    refusals = [one for one in plan.refusals if one.setting not in _NOT_NEEDED.get(what, ())]
    if refusals:
        raise RunRefused([str(refusal) for refusal in refusals])


@contextmanager
def _ctrl_c() -> Generator[Callable[[], None]]:
    """Remember a Ctrl-C: what is imported may swallow the exception. The function raises it again."""
    pressed = False

    def note(*_: object) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    def raise_if_pressed() -> None:
        if pressed:
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield raise_if_pressed
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield raise_if_pressed
    finally:
        signal.signal(signal.SIGINT, before)
