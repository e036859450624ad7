"""A plan for people (tables) and for machines (JSON)."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from offbeat_recipes.planning.memory import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import IO

    from offbeat_recipes.planning.placement import Placed
    from offbeat_recipes.planning.plan import BatchPlan, Plan

_NUMBER = re.compile(r" \d+")


def plan_json(plan: Plan) -> str:
    """Return `plan` as one line of JSON; memory in bytes."""
    return json.dumps({"ok": not plan.refusals, **asdict(plan)})


def print_plan(plan: Plan, out: IO[str]) -> None:
    """Print `plan` to `out`: placement, batch, memory, notes, and what is refused with its remedy."""
    console = Console(file=out, highlight=False, soft_wrap=True)
    console.print(_pairs("Placement", _ranges(plan.placement)))
    console.print(_pairs("Batch", _batch_lines(plan.batch).items()))
    if plan.memory:
        console.print(_memory_table(plan))
    for warning in plan.warnings:
        console.print(Text.assemble(("note ", "yellow"), warning))
    for refusal in plan.refusals:
        console.print(Text.assemble(("refused ", "bold red"), str(refusal)))
    if not plan.refusals:
        console.print(Text("This can run. Nothing was started.", "green"))


def _ranges(placement: Sequence[Placed]) -> Iterator[tuple[str, str]]:
    """Yield a line of all that follow one another in the same kind of place: "training rank 0 to 7 (fsdp2)"."""
    for _, group in groupby(placement, key=lambda one: (_NUMBER.sub("", one.process), one.where)):
        same = list(group)
        last = _NUMBER.search(same[-1].process)
        to = f" to{last[0]}" if last and len(same) > 1 else ""
        yield _NUMBER.sub(rf"\g<0>{to}", same[0].process, count=1), same[0].where


def _pairs(title: str, lines: Iterable[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    for name, value in lines:
        table.add_row(name, value)
    return table


def _batch_lines(batch: BatchPlan) -> dict[str, str]:
    completions, updates = batch.completions_per_step, batch.updates_per_step
    share = f"{batch.sequences_per_update} sequences, about {batch.sequences_per_rank} a rank"
    run = f"{batch.steps} steps, {batch.optimizer_steps} updates, last version {batch.final_version}"
    return {
        "completions per step": f"{batch.prompts_per_step} prompts x {batch.group_size} = {completions}",
        "mini-batches per step": f"{updates} of {share}",
        "tokens per step, at most": f"{completions} x {batch.max_tokens_per_sequence} = {batch.max_tokens_per_step}",
        "the run": run,
        "completions in all": f"{batch.completions_in_all}",
    }


def _memory_table(plan: Plan) -> Table:
    table = Table(
        title=f"Memory ({plan.num_params:,} parameters; libraries come on top)",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for column in ("process", "what", "each"):
        table.add_column(column, justify="right" if column == "each" else "left")
    for memory in plan.memory:
        table.add_row(f"{memory.num} x {memory.process}", "all", _size(memory.total), style="bold")
        for what, num_bytes in memory.items:
            table.add_row("", what, _size(num_bytes))
    return table


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"
