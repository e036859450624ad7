"""Write docs/algorithms/: a page for each installed algorithm, made of its class and its settings, and the table of all.

Run without arguments to write the pages; with --check to fail where a committed one is not what would be written. The figures are
drawn from the code: a policy loss is called on ratios, advantages on groups with more and more right completions, a loss of pairs
on margins.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from offbeat_recipes.settings.described import Described, described
from offbeat_rollout import Completion, Finish
from offbeat_trainer.algorithms.grpo import Grpo
from offbeat_trainer.algorithms.interface import StepShape
from offbeat_trainer.algorithms.policy_loss import Tokens
from offbeat_trainer.algorithms.registry import algorithm_class, algorithm_names
from offbeat_trainer.algorithms.written.pairs import PairAlgorithm
from offbeat_trainer.config import AlgorithmConfig, GrpoConfig, PolicyLossConfig
from offbeat_trainer.data.types import Group, Prompt, Score, Trajectory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat_trainer.algorithms.interface import Algorithm

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "algorithms"
GROUP_SIZE = 8
SOURCE = re.compile(r"arXiv (\d{4}\.\d{4,5})")
WIDTH, HEIGHT, LEFT, BOTTOM = 480, 240, 56, 40
COLORS = ("#0b7285", "#c2410c")
HEAD = """\
# Installed algorithms

Written by `tools/make_algorithm_pages.py` from the classes; change those, not these pages. [Algorithms](../algorithms.md) says how they
are put together, and how to write one of your own.

| `algorithm=` | what it is | source |
|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a figure: what it shows, and its points."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Curves over one axis."""

    title: str
    axis: str
    curves: Sequence[Curve]

    def svg(self) -> str:
        """Return it drawn, with a title for those who do not see it."""
        points = [point for curve in self.curves for point in curve.points]
        low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
        low_y, high_y = min(0.0, *(y for _, y in points)), max(0.0, *(y for _, y in points))
        margin = 0.08 * (high_y - low_y or 1.0)
        low_y, high_y = low_y - margin, high_y + margin

        def place(x: float, y: float) -> str:
            across = LEFT + (x - low_x) / (high_x - low_x) * (WIDTH - LEFT - 24)
            down = 28 + (high_y - y) / (high_y - low_y) * (HEIGHT - BOTTOM - 28)
            return f"{across:.1f},{down:.1f}"

        text = 'font-family="sans-serif" font-size="11" fill="#495057"'
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{self.title}</title>',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
            f'<polyline points="{place(low_x, 0)} {place(high_x, 0)}" stroke="#adb5bd" fill="none"/>',
            f'<text x="{LEFT}" y="{HEIGHT - 8}" {text}>{self.axis}</text>',
        ]
        for x in (low_x, (low_x + high_x) / 2, high_x):
            across = place(x, low_y).partition(",")[0]
            parts.append(
                f'<text x="{across}" y="{HEIGHT - 24}" text-anchor="middle" {text}>{_short(x)}</text>'
            )
        for y in (low_y + margin, 0.0, high_y - margin):
            down = place(low_x, y).partition(",")[2]
            parts.append(f'<text x="{LEFT - 6}" y="{down}" text-anchor="end" {text}>{_short(y)}</text>')
        for index, curve in enumerate(self.curves):
            color = COLORS[index % len(COLORS)]
            drawn = " ".join(place(*point) for point in curve.points)
            parts.append(f'<polyline points="{drawn}" stroke="{color}" stroke-width="2" fill="none"/>')
            parts.append(
                f'<text x="{LEFT + 200 * index}" y="16" {text}><tspan fill="{color}">■</tspan> {curve.name}</text>'
            )
        return "\n".join([*parts, "</svg>"]) + "\n"


def _short(value: float) -> str:
    return f"{round(value, 4):g}".replace("-0", "0") if value == 0 else f"{round(value, 4):g}"


def made(name: str, size: int = GROUP_SIZE) -> Algorithm[AlgorithmConfig]:
    """Return the algorithm `name` with its defaults."""
    cls = algorithm_class(name)
    return cls(config=cls.Config(), step=StepShape(group_size=size))


@cache
def figures(name: str) -> dict[str, Figure]:
    """Return what can be drawn of the algorithm `name`, by the file it goes to; what is as GRPO has it is drawn there."""
    cls, found = algorithm_class(name), dict[str, Figure]()
    if issubclass(cls, PairAlgorithm):
        return {f"{name}-margin.svg": margin(made(name))}
    if issubclass(cls, Grpo):
        found |= {f"{name}-weight.svg": weight(made(name)), f"{name}-advantages.svg": advantages(made(name))}
    if name == "grpo":
        return found
    usual = figures("grpo")
    return {
        file: one for file, one in found.items() if one.curves != usual[file.replace(name, "grpo")].curves
    }


def margin(algorithm: Any) -> Figure:  # noqa: ANN401 - a `PairAlgorithm`
    """Return the loss of a pair, and its pull, by how far the chosen completion is above the rejected one; their sum stays."""
    variant = algorithm.loss_fn().variant
    gaps = torch.linspace(-6, 6, 121, dtype=torch.float64).requires_grad_()
    losses = variant((-7 + gaps) / 2, (-7 - gaps) / 2)
    (gradients,) = torch.autograd.grad(losses.sum(), gaps)
    loss, pull = _points(gaps, losses), _points(gaps, -gradients)
    return Figure(
        title=f"{type(algorithm).__name__}: loss of a pair by its margin",
        axis="c - r, the score of the chosen completion less the other's (c + r = -7)",
        curves=[Curve("loss", loss), Curve("pull on the margin, - d loss / d (c - r)", pull)],
    )


def weight(algorithm: Any) -> Figure:  # noqa: ANN401 - a `Grpo`
    """Return the weight of a token's log-probability in the gradient, by its ratio: -d loss / d log pi, of a completion of one token."""
    high = algorithm.config.clip_high
    far = min(6.5, 1.3 * getattr(algorithm.config, "ratio_cap", 1 + high))
    span = (1 - 4 * high, 1 + 4 * high) if high < 0.05 else (0.02, max(2.0, far))
    ratios = torch.linspace(*span, 201, dtype=torch.float64)
    curves = [Curve(f"A = {sign:+d}", _points(ratios, _pull(algorithm, ratios, sign))) for sign in (1, -1)]
    return Figure(
        title=f"{type(algorithm).__name__}: weight of log pi in the gradient by the ratio",
        axis="ratio pi / pi_old; upward: the token becomes more likely",
        curves=curves,
    )


def _pull(algorithm: Any, ratios: torch.Tensor, advantage: int) -> torch.Tensor:  # noqa: ANN401 - a `Grpo`
    logprobs = (ratios.log() - 1.0)[:, None].requires_grad_()
    old = torch.full_like(logprobs, -1.0)
    found = called_surrogate(algorithm, logprobs, old, torch.full_like(logprobs, float(advantage)))
    if not found.requires_grad:
        return torch.zeros_like(ratios)
    (gradient,) = torch.autograd.grad(found.sum(), logprobs, allow_unused=True, materialize_grads=True)
    return -gradient[:, 0]


def _points(across: torch.Tensor, up: torch.Tensor) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in zip(across.detach(), up.detach(), strict=True)]


def called_surrogate(
    algorithm: Any,  # noqa: ANN401 - a `Grpo`
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantage: torch.Tensor,
) -> torch.Tensor:
    """Return the loss of tokens [B, T] by the algorithm's own surrogate."""
    tokens = Tokens(
        logprobs=logprobs,
        old_logprobs=old,
        mask=torch.ones_like(old, dtype=torch.bool),
        chosen=torch.zeros_like(old, dtype=torch.bool),
    )
    return algorithm.surrogate((logprobs - old).exp(), advantage, tokens).loss


def advantages(algorithm: Algorithm[AlgorithmConfig]) -> Figure:
    """Return the advantage of a right and of a wrong completion, by how many of a group are right."""
    right, wrong = list[tuple[float, float]](), list[tuple[float, float]]()
    for count in range(1, GROUP_SIZE):
        found = algorithm.targets([_group(count)])["advantages"].double().reshape(GROUP_SIZE, -1)[:, 0]
        right.append((float(count), float(found[0])))
        wrong.append((float(count), float(found[-1])))
    return Figure(
        title=f"{type(algorithm).__name__}: advantages in a group of {GROUP_SIZE}",
        axis=f"completions of {GROUP_SIZE} that are right (reward 1, others 0)",
        curves=[Curve("advantage of a right one", right), Curve("of a wrong one", wrong)],
    )


def _group(num_right: int) -> Group:
    scores = tuple(
        Score(reward=float(index < num_right), correct=index < num_right) for index in range(GROUP_SIZE)
    )
    trajectories = tuple(
        Trajectory.of(
            Completion.of(
                request_id=str(index), token_ids=[3], logprobs=[-1.0], policy_versions=[1], finish=Finish.STOP
            )
        )
        for index in range(GROUP_SIZE)
    )
    prompt = Prompt(uid="one", text="1+1=", token_ids=(1, 2))
    return Group(prompt=prompt, trajectories=trajectories, scores=scores, baseline=(Score(reward=0.5),))


def page(name: str) -> str:
    """Return the page of the algorithm `name`."""
    what, formula, use = paragraphs(name)
    drawn = [f"![{one.title}]({file})" for file, one in figures(name).items()]
    return (
        "\n\n".join(
            [
                f"# {name}",
                f"{_linked(what)}",
                f"```\n{formula}\n```",
                use,
                *drawn,
                "## Settings",
                f"`offbeat train algorithm={name}`. {_from_where(name)}",
                _table(name),
            ]
        )
        + "\n"
    )


def paragraphs(name: str) -> list[str]:
    """Return what the docstring of the class of `name` says: what it is, its formula, when to use it.

    Raises:
        SystemExit: it does not have these three paragraphs.
    """
    cls = algorithm_class(name)
    parts = re.split(r"\n\s*\n", inspect.cleandoc(cls.__doc__ or ""))
    if len(parts) != 3:
        sys.exit(
            f"the docstring of {cls.__name__} has {len(parts)} paragraphs; it has three: what it is, its formula, when to use it"
        )
    return [parts[0].replace("\n", " "), parts[1], parts[2].replace("\n", " ")]


def _linked(text: str) -> str:
    return SOURCE.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", text)


def _from_where(name: str) -> str:
    cls = algorithm_class(name)
    place = f"`{cls.__module__}`"
    return f"The code is in {place}. Settings that the family shares are in [Settings](../settings.md); these are its own, or have another default:"


def _table(name: str) -> str:
    config = algorithm_class(name).Config
    base = {item.name: item for item in fields(_parent(config))}
    known = {item.path: item for item in described()}
    rows = [
        _row(known[f"algorithm.{item.name}"], item)
        for item in fields(config)
        if "derived" not in item.metadata
        and (item.name not in base or _default(item) != _default(base[item.name]))
    ]
    if not rows:
        return "None."
    return "\n".join(["| setting | default | values | what it does |", "|---|---|---|---|", *rows])


def _parent(config: type[AlgorithmConfig]) -> type[AlgorithmConfig]:
    """Return the class of settings that a page leaves out: those of its family."""
    families = (GrpoConfig, PolicyLossConfig)
    return next((one for one in families if issubclass(config, one) and config is not one), AlgorithmConfig)


def _row(item: Described, field: Any) -> str:  # noqa: ANN401 - a dataclass field
    value = _default(field)
    values, said = (text.replace("|", "\\|") for text in (item.values, item.help))
    return f"| `{item.path}` | `{getattr(value, 'value', value)}` | {values} | {said} |"


def _default(field: Any) -> object:  # noqa: ANN401 - a dataclass field
    return field.default if field.default_factory is MISSING else field.default_factory()


def table() -> str:
    """Return the page that lists them."""
    rows: list[str] = []
    for name in algorithm_names():
        what = paragraphs(name)[0]
        said = what.partition(": ")[2] or what
        ids = ", ".join(
            f"[{found}](https://arxiv.org/abs/{found})" for found in dict.fromkeys(SOURCE.findall(what))
        )
        rows.append(f"| [`{name}`]({name}.md) | {said} | {ids} |")
    return HEAD + "\n".join(rows) + "\n"


def files() -> dict[str, str]:
    """Return the text of every file of the folder, by name."""
    found = {"index.md": table()}
    for name in algorithm_names():
        found[f"{name}.md"] = page(name)
        found |= {file: figure.svg() for file, figure in figures(name).items()}
    return found


def main() -> None:
    """Write the pages, or with --check exit 1 where one is not current, or is there and belongs to none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page is stale")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the pages are")
    options = parser.parse_args()
    wanted = files()
    there = {path.name: path for path in options.folder.glob("*")} if options.folder.is_dir() else {}
    stale = [name for name, text in wanted.items() if name not in there or there[name].read_text() != text]
    left = sorted(there.keys() - wanted.keys())
    if options.check:
        if stale or left:
            sys.exit(
                f"{', '.join([*stale, *left])}: not what the algorithms are; run tools/make_algorithm_pages.py and commit it"
            )
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in stale:
        (options.folder / name).write_text(wanted[name])
    for name in left:
        there[name].unlink()


if __name__ == "__main__":
    main()
