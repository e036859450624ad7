"""`conformance`: the whole suite as one test class for pytest, over an engine, its features and model families."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any
from unittest import SkipTest

from offbeat_engine.config import Feature
from offbeat_engine.interface import engine_class
from offbeat_engine.testing import cases_calls, cases_features, cases_state, cases_training
from offbeat_engine.testing.models import FAMILIES
from offbeat_engine.testing.runner import Case, Options, Runner, Tolerances

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from offbeat_engine.config import Capabilities
    from offbeat_engine.interface import Engine
    from offbeat_engine.testing.models import Variant


def conformance(  # noqa: PLR0913 all but the engine have defaults
    engine: str | type[Engine],
    *,
    families: Iterable[str] = tuple(FAMILIES),
    crossed: Iterable[str] = tuple(FAMILIES),
    num_ranks: int = 4,
    device: str = "cpu",
    slow: Callable[[Any], Any] | None = None,
    deep: Callable[[Any], Any] | None = None,
    timeout_s: float = 600.0,
    tolerances: Tolerances | None = None,
    extra_variants: Iterable[Variant] = (),
) -> type:
    """Return a test class that puts `engine` through every case; give it a name that starts with `Test`.

    What the engine declares in `capabilities()` is exercised; what it names in `missing` is skipped with its own
    reason; a declared feature that no case exercises is a failure.

    Args:
        engine: a name in the entry-point group `offbeat.engines`, or an `Engine` class.
        families: names from `offbeat_engine.testing.FAMILIES`.
        crossed: those of them that deep cases cross with every way to train; each of the others has the plain way and some.
        num_ranks: the most processes to start at a time; an engine's own `max_ranks` is respected too.
        device: "cpu", or "cuda" with one GPU per rank.
        slow: a decorator for cases of four ranks and of compilation, such as `pytest.mark.slow`.
        deep: a decorator for cases that cross families with features; the others have each of both once.
        timeout_s: deadline of every call to the ranks.
        tolerances: other limits than the stated ones, for devices with other arithmetic.
        extra_variants: ways to train that only this engine has; each goes through training and checkpoints, exactly as ours.

    Raises:
        ConfigError: no engine of that name is installed.
        ValueError: a family is not known.
    """
    options = Options(
        engine=engine_class(engine) if isinstance(engine, str) else engine,
        families=tuple(families),
        crossed=tuple(crossed),
        num_ranks=num_ranks,
        device=device,
        timeout_s=timeout_s,
        tolerances=Tolerances() if tolerances is None else tolerances,
        extra_variants=tuple(extra_variants),
    )
    return _test_class(options, slow, deep)


def cases(options: Options) -> list[Case]:
    """Return every case of the suite for `options`, whether the engine declares what it needs or not.

    Raises:
        ValueError: a family is not known.
    """
    unknown = [name for name in options.families if name not in FAMILIES]
    if unknown or not options.families:
        raise ValueError(f"`families` must be some of {', '.join(FAMILIES)}; got {options.families}")
    declared = Case(name="declaration", check=check_declaration)
    sources = (cases_training, cases_features, cases_state, cases_calls)
    return [declared, *chain.from_iterable(source.cases(options) for source in sources)]


def reason_to_skip(case: Case, capabilities: Capabilities, options: Options) -> str | None:
    """Return why `case` is not for this engine, in the engine's own words where it has some, or None."""
    for feature in sorted(case.features - capabilities.features):
        reason = capabilities.missing.get(feature, "it says nothing about it")
        return f"{capabilities.engine} does not declare {feature}: {reason}"
    if capabilities.max_ranks is not None and case.num_ranks > capabilities.max_ranks:
        return f"{capabilities.engine} runs on at most {capabilities.max_ranks} rank(s), the case takes {case.num_ranks}"
    if case.num_ranks > options.num_ranks:
        return f"the case takes {case.num_ranks} ranks and `num_ranks` is {options.num_ranks}"
    return None


def check_declaration(runner: Runner) -> None:
    """Every feature is declared or missing with a reason, not both, and every declared one is exercised.

    Raises:
        AssertionError: naming the features for which that does not hold.
    """
    options = runner.options
    said = options.engine.capabilities()
    both = said.features & said.missing.keys()
    silent = set(Feature) - said.features - said.missing.keys()
    mute = {feature for feature, reason in said.missing.items() if not reason}
    for wrong, what in (
        (both, "both declared and missing"),
        (silent, "neither declared nor missing"),
        (mute, "missing without a reason"),
    ):
        if wrong:
            raise AssertionError(f"{said.engine}: {', '.join(sorted(wrong))}: {what}; say one or the other")
    open_to_it = [case for case in cases(options) if reason_to_skip(case, said, options) is None]
    idle = said.features.difference(*(case.features for case in open_to_it))
    if idle:
        raise AssertionError(
            f"{said.engine} declares {', '.join(sorted(idle))}, which no case exercises (with `num_ranks` "
            f"{options.num_ranks} and families {', '.join(options.families)}); do not declare it, or run more"
        )


def _test_class(
    options: Options, slow: Callable[[Any], Any] | None, deep: Callable[[Any], Any] | None
) -> type:
    body: dict[str, Any] = {"__doc__": f"The conformance suite on {options.engine.__name__}."}
    body |= {"setup_class": classmethod(_setup), "teardown_class": classmethod(_teardown), "options": options}
    for case in cases(options):
        method = _method(case)
        for applies, mark in ((case.slow, slow), (case.deep, deep)):
            method = mark(method) if applies and mark is not None else method
        body[f"test_{case.name}"] = method
    return type(f"Conformance{options.engine.__name__}", (), body)


def _method(case: Case) -> Callable[[Any], None]:
    def test(self: Any) -> None:
        runner: Runner = self.runner
        reason = reason_to_skip(case, runner.options.engine.capabilities(), runner.options)
        if reason is not None:
            raise SkipTest(reason)
        case.check(runner)

    test.__name__ = f"test_{case.name}"
    test.__doc__ = f"The case `{case.name}` of the conformance suite."
    return test


def _setup(cls: Any) -> None:
    cls.runner = Runner(cls.options)


def _teardown(cls: Any) -> None:
    cls.runner.close()
