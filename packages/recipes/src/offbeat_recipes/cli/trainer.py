"""Offbeat from Python: `Trainer(model=.., reward=.., data=..).train()`, the same run as `offbeat train` makes.

What is given as an object, a function, a class or rows, is written into the run folder, from which the processes of the run read it.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from offbeat_recipes.cli._environment import prepare_environment
from offbeat_recipes.cli._hydra import compose_run, groups, in_quotes, of_recipe
from offbeat_recipes.errors import DataError, RunFailed, RunFolderError, SettingError, TaskError
from offbeat_recipes.settings.typed import function_takes_settings, takes_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat_recipes.planning.plan import Plan
    from offbeat_recipes.run.context import Caller
    from offbeat_recipes.run.live import LiveSession
    from offbeat_recipes.settings.tree import RunConfig

PROG = "Trainer"
INTERRUPTED = 130
_LOOK_S = 0.1
_SETTINGS = {"environment": "environment.path"}
"""Where the path of an object goes whose setting is called otherwise."""


class Trainer:
    """A run that is yet to be made; `plan` says what it would do, `train` does it.

    ```python
    result = Trainer(model="models/qwen", reward=my_reward, data=rows, trainer={"steps": 50}).train()
    ```
    """

    @takes_settings
    def __init__(  # noqa: PLR0913 what a run is made of; all have defaults
        self,
        *,
        model: str | Path | Mapping[str, object] | None = None,
        reward: object = None,
        data: object = None,
        validation: object = None,
        environment: object = None,
        algorithm: object = None,
        task: object = None,
        **settings: object,
    ) -> None:
        """Keep what a run is told. Nothing is checked before `plan` or `train`.

        Args:
            model: a Hugging Face folder, or "owner/name" or "owner/name@revision" of one in the hub's cache; `model.path`.
            reward: a function or several, or "file.py:name"; docs/rewards.md says what it is called with.
            data: rows to be trained on: a path, or mappings, say a list of dicts or a `datasets.Dataset` (one split).
            validation: held-out rows, or several sets by name, each measured by itself, too; without them nothing is validated.
            environment: a class, or "file.py:Name", for several turns; docs/environments.md.
            algorithm: a name, a class, or "file.py:Name"; GRPO by default.
            task: a name, a class, one that is made already, or "file.py:Name"; by default "file", whose rows and rewards
                are those above.
            settings: all other settings by their names, nested as dicts, `trainer={"steps": 50}`, or dotted,
                `**{"trainer.steps": 50}`; groups by their choice, `rollout="hf"`. A dict in the place of what is above
                is a section of settings, too.
        """
        given: dict[str, object] = {"model": model, "reward": reward, "task": task}
        given |= {"environment": environment, "algorithm": algorithm}
        sections = {name: given[name] for name in given if isinstance(given[name], Mapping)}
        given |= dict.fromkeys(sections)
        rewards = given["reward"]
        self._rewards = cast("list[object]", [*rewards] if isinstance(rewards, list | tuple) else [rewards])
        self._objects = {name: given[name] for name in ("environment", "algorithm")}
        if given["task"] is not None and not isinstance(task, str):
            self._objects["task"], given["task"] = task if isinstance(task, type) else _class_of(task), None
        held_out = {name: _rows(rows) for name, rows in _held_out(validation).items()}
        self._data = {"train": _rows(data), **held_out}
        self._settings: dict[str, object] = {"model.path": str(given["model"])} if given["model"] else {}
        named = cast("Mapping[str, object]", sections.get("task", {})).get("name")
        if given["task"] or (data is not None and "task" not in self._objects):
            self._settings["task"] = given["task"] or named or "file"
        if data is not None and validation is None:
            self._settings["trainer.validation_prompts"] = 0
        self._settings |= settings
        self._sections = sections

    def plan(self) -> ShownPlan:
        """Return what the run would do and what is refused, as `offbeat plan` prints it; nothing is started.

        Raises:
            RecipeError: the settings, the data or an object cannot be used.
        """
        with TemporaryDirectory(prefix="offbeat-") as stage:
            config = self._config(Path(stage))
            prepare_environment()
            from offbeat_recipes.planning.facts import gather_facts  # torch from here on
            from offbeat_recipes.planning.plan import plan_run

            plan = plan_run(config, gather_facts(config, opens_data=True))
            recipe = of_recipe([*_overrides(self._settings), *_overrides(self._sections)], config)
            return ShownPlan(replace(plan, warnings=(recipe.note, *plan.warnings)) if recipe else plan)

    def train(self) -> Result:
        """Train, and return what came of it. It may be called in a thread, and beside an event loop, which it blocks.

        With `report={"console": False}` nothing is printed.

        Raises:
            RunRefused: the plan refuses the run; nothing was started.
            RecipeError: the settings, the data, an object or the run folder cannot be used; nothing was started.
            RunFailed: the run began and failed; the same call with `resume="auto"` goes on.
            KeyboardInterrupt: it was interrupted; as above.
        """
        prepare_environment()
        from offbeat_recipes.run.context import Caller  # torch from here on

        caller = Caller()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._train(caller)
        return _beside(lambda: self._train(caller), caller)

    def session(self) -> LiveSession:
        """Return everything that a run has but its loop, for a loop of one's own: `with trainer.session() as session:`.

        Raises:
            RecipeError: the settings, the data or an object cannot be used; what the plan refuses is raised by `with`.
        """
        with TemporaryDirectory(prefix="offbeat-") as stage:
            config = self._config(Path(stage))
        if not config.generates:
            raise SettingError(
                [
                    f"algorithm={config.algorithm.name} learns from written rows and a session samples: call `train`"
                ]
            )
        prepare_environment()
        from offbeat_recipes.run.live import LiveSession  # torch from here on

        return LiveSession(lambda handover, caller: self._driven("hold", caller, handover)[0], config.folder)

    def _train(self, caller: Caller) -> Result:
        code, config = self._driven("train", caller)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        if code:
            raise RunFailed(caller.error, config.folder)
        return Result(folder=config.folder, _config=config)

    def _driven(self, what: str, caller: Caller, *more: object) -> tuple[int, RunConfig]:
        """Plan, and run the command `offbeat_recipes.run.commands.<what>`; return its exit code and the settings."""
        from offbeat_recipes.cli._checked import started

        began_s = time.perf_counter()
        with TemporaryDirectory(prefix="offbeat-") as stage:
            config = self._config(Path(stage))
            code = started(
                PROG,
                config,
                what,
                lambda command: command(self._settled(config), began_s, caller, *more),
                sys.stderr.write if config.report.console else _silent,
            )
        return code, config

    def _settled(self, planned: RunConfig) -> RunConfig:
        """Return the settings with all objects in the run folder, from which an earlier run is moved aside unless it goes on.

        Raises:
            RunFolderError: it goes on with other rows than it began with; nothing was changed.
        """
        from offbeat_recipes.run.folder import CONFIG, OBJECTS, make_way

        make_way(planned.folder, resume=planned.resume == "auto")
        again, objects = (planned.folder / CONFIG).exists(), planned.folder / OBJECTS
        for key, rows in self._data.items():
            before = objects / f"{key}.jsonl"
            if before.exists() and isinstance(rows, list) and before.read_bytes() != _as_jsonl(rows):
                raise RunFolderError(
                    f"{planned.folder} began with other rows of `{key}` than are given now; going on would not be the same run. Give "
                    "those, or start a new run with resume='never'"
                )
        config = self._config(objects)
        names = [*filter(None, map(_given_name, [*self._rewards, *self._objects.values()]))]
        if again and names and planned.report.console:
            sys.stderr.write(f"{PROG}: note: the run goes on with {', '.join(names)} as given now\n")
        return config

    def _config(self, folder: Path) -> RunConfig:
        """Return the settings of the run, with objects and rows written to `folder`."""
        named = self._written(folder)
        overrides = [*_overrides({**named, **self._settings}), *_overrides(self._sections)]
        return compose_run(overrides)

    def _written(self, folder: Path) -> dict[str, object]:
        taken: set[str] = set()

        def place(value: object) -> str:
            if isinstance(value, str):
                return value
            return _save(value, folder, taken)

        named: dict[str, object] = {}
        files: dict[str, list[str]] = {}
        for key, rows in self._data.items():
            file = folder / f"{key}.jsonl"
            if rows is not None and not isinstance(rows, str):
                _private(folder)
                _private(file.parent)
                file.write_bytes(_as_jsonl(rows))
            if rows is not None:
                files.setdefault(f"task.{key.partition('/')[0]}_path", []).append(
                    rows if isinstance(rows, str) else str(file)
                )
        named |= {setting: paths[0] if len(paths) == 1 else paths for setting, paths in files.items()}
        if places := [place(one) for one in self._rewards if one is not None]:
            named["task.reward"] = places[0] if len(places) == 1 else places
        paths = {name: place(value) for name, value in self._objects.items() if value is not None}
        return named | {_SETTINGS.get(name, name): path for name, path in paths.items()}


@function_takes_settings
def plan(**given: Any) -> ShownPlan:  # noqa: ANN401 what `Trainer` takes
    """Return what `Trainer(**given)` would do and what is refused: its `plan`."""
    return Trainer(**given).plan()


class ShownPlan:
    """A plan that prints itself, in a notebook too; `plan` has its parts."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @property
    def refusals(self) -> list[str]:
        """What is refused, one sentence each; empty where the run can be made."""
        return [str(refusal) for refusal in self.plan.refusals]

    def __repr__(self) -> str:
        """Return the plan as `offbeat plan` prints it."""
        from offbeat_recipes.planning.view import print_plan

        text = io.StringIO()
        print_plan(self.plan, text)
        return text.getvalue()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a run, read from its `folder`."""

    folder: Path
    _config: RunConfig = field(repr=False)

    @property
    def model(self) -> Path:
        """The trained model: a Hugging Face folder."""
        return self.folder / "final"

    @property
    def report(self) -> Path:
        """The page that shows the run."""
        return self.folder / "report.html"

    @property
    def summary(self) -> dict[str, Any]:
        """The figures of the whole run, those of `summary.json`."""
        return cast("dict[str, Any]", json.loads((self.folder / "summary.json").read_text(encoding="utf-8")))

    @property
    def accuracy(self) -> float | None:
        """The share of held-out prompts that are answered right at the end; None where that was not measured."""
        return cast("float | None", self.summary["accuracy_after"])

    @property
    def history(self) -> list[dict[str, Any]]:
        """The metrics of every step, docs/metrics.md."""
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics of the last step."""
        return self.history[-1]

    def generate(
        self, prompts: Sequence[str], *, max_tokens: int | None = None, temperature: float = 0.0
    ) -> list[str]:
        """Return what the trained model says to each of `prompts`, by Transformers, in this process.

        The tokenizer's chat template is applied as it was in training. `max_tokens` is by default that of training; `temperature`
        0 is greedy.
        """
        from transformers import AutoModelForCausalLM

        from offbeat_recipes.tasks.config import PromptConfig
        from offbeat_recipes.tasks.rows import Row
        from offbeat_recipes.tasks.text import PromptMaker

        config, trust = self._config, self._config.model.trust_remote_code
        template = config.task.chat_template if isinstance(config.task, PromptConfig) else "never"
        maker = PromptMaker(str(self.model), template, trust_remote_code=trust)
        load = cast("Any", AutoModelForCausalLM).from_pretrained
        model = load(self.model, local_files_only=True, trust_remote_code=trust).to(config.device)
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        asked = [(Row(path="prompts", number=n, values={}), text) for n, text in enumerate(prompts, 1)]
        completions: list[str] = []
        for loaded in maker.load(
            asked
        ):  # one by one: no padding, so that a prompt's answer depends on nothing else
            ids = model.dummy_inputs["input_ids"].new_tensor([list(loaded.token_ids)]).to(model.device)
            out = model.generate(
                ids,
                attention_mask=ids.new_ones(ids.shape),
                max_new_tokens=max_tokens or config.max_new_tokens,
                eos_token_id=list(maker.stop_token_ids()),
                pad_token_id=maker.stop_token_ids()[0],
                **sampling,
            )
            completions.append(
                cast("str", maker.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
            )
        return completions


def _beside(work: Callable[[], Result], caller: Caller) -> Result:
    """Return what `work` gives, done in a thread: an event loop runs in this one. Ctrl-C here is Ctrl-C there."""
    with ThreadPoolExecutor(1, thread_name_prefix="offbeat run") as thread:
        run, pressed = thread.submit(work), False
        while not run.done():
            try:
                wait([run], _LOOK_S)
            except KeyboardInterrupt:
                pressed = True
            if pressed and caller.press is not None:  # before that it is planned, which takes seconds
                caller.press()
                pressed = False
        return run.result()


def _silent(text: str) -> None:
    del text


def _rows(given: object) -> list[object] | str | None:
    """Return rows as a list, a path as a text."""
    if given is None or isinstance(given, str):
        return given
    if isinstance(given, Path):
        return str(given)
    if _is_mapping(given):
        raise DataError(
            f"data: expected rows, got {', '.join(map(str, given)) or 'nothing'} by name; give one of them, say data['train']"
        )
    if _is_iterable(given):
        return [*given]
    raise DataError(f"data: expected a path or rows, such as a list of dicts, got {type(given).__name__}")


def _held_out(given: object) -> dict[str, object]:
    """Return validation rows by the file that they are written to: several sets, each below a folder, or one."""
    if not _is_mapping(given):
        return {"validation": given}
    if odd := [name for name in given if not re.fullmatch(r"\w+", str(name))]:
        raise DataError(f"validation: the name of a set is letters, digits and underscores, got {odd[0]!r}")
    return {f"validation/{name}": rows for name, rows in given.items()}


def _as_jsonl(rows: list[object]) -> bytes:
    """Return `rows` as the bytes of a JSONL file."""
    lines: list[str] = []
    for number, row in enumerate(rows, start=1):
        if not _is_mapping(row):
            raise DataError(
                f"data, row {number}: expected a mapping of columns, such as {{'prompt': ..}}, got {row!r:.60}"
            )
        try:
            lines.append(json.dumps({**row}, ensure_ascii=False) + "\n")
        except (TypeError, ValueError) as error:
            raise DataError(f"data, row {number}: cannot be written as JSON: {error}") from error
    return "".join(lines).encode("utf-8", "surrogatepass")


def _class_of(task: object) -> type:
    """Return a class of tasks of which each is `task` as it was made, whatever it is called with."""

    def keep(self: object, *_: object, **__: object) -> None:
        vars(self).update(vars(task))

    return type(type(task).__name__, (type(task),), {"__init__": keep})


def _is_iterable(value: object) -> TypeGuard[Iterable[object]]:
    return isinstance(value, Iterable)


def _is_mapping(value: object) -> TypeGuard[Mapping[str, object]]:
    return isinstance(value, Mapping)


def _save(value: object, folder: Path, taken: set[str]) -> str:
    """Write an object to `folder` under a name that is not `taken` yet, and return the path that settings name it by."""
    from offbeat_trainer.data.loading import name_of, save_object
    from offbeat_trainer.errors import LoadError

    if not callable(value):
        raise TaskError(
            f"{PROG}: expected a function, a class or a path such as file.py:name, got {value!r:.60}"
        )
    name = name_of(value)
    taken.add(name := next(n for n in (name, *(f"{name}_{i}" for i in range(2, 99))) if n not in taken))
    _private(folder)
    try:
        save_object(value, folder / f"{name}.pkl")
    except LoadError as error:
        raise TaskError(f"{PROG}: {error}") from error
    return f"{folder / name}.pkl:{name}"


def _private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _given_name(value: object) -> str:
    """Return the name of an object; nothing for what is named by a path, or not given."""
    return (
        ""
        if value is None or isinstance(value, str)
        else str(getattr(value, "__name__", type(value).__name__))
    )


def _overrides(settings: Mapping[str, object], prefix: str = "") -> Iterable[str]:
    """Yield nested `settings` as a command line has them."""
    for key, value in settings.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _overrides(cast("Mapping[str, object]", value), f"{path}.")
        elif path in groups() and isinstance(value, str):
            yield f"{path}={value}"
        else:
            yield f"{path}={_in_grammar(value)}"


def _in_grammar(value: object) -> str:
    """Return a value as Hydra's grammar has it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        raise SettingError(
            [f"expected a text, a number or a list of those in a list, got {cast('object', value)!r:.60}"]
        )
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_in_grammar, cast('Sequence[object]', value)))}]"
    if isinstance(value, Enum):
        value = value.value
    return repr(value) if isinstance(value, int | float) else in_quotes(str(value))
