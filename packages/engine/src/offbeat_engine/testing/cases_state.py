"""Cases about state: checkpoints, export, the manifest, and moving between devices."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from offbeat_engine.config import Feature
from offbeat_engine.testing import probes
from offbeat_engine.testing.cases_features import LORA
from offbeat_engine.testing.cases_training import check_weights
from offbeat_engine.testing.compare import check_number, check_tensors, check_tokens
from offbeat_engine.testing.models import VARIANTS, Variant
from offbeat_engine.testing.reference import load_reference, reference_logprobs
from offbeat_engine.testing.runner import BATCHES, KEPT, STALE, STEPS, Case

if TYPE_CHECKING:
    from collections.abc import Iterator

    from offbeat_engine.testing.probes import Record
    from offbeat_engine.testing.reference import Reference
    from offbeat_engine.testing.runner import Options, Runner

_NAMES = {"frozen", "values", "offloaded", "replicated", "sequence_2"}
_VARIANTS = tuple(variant for variant in VARIANTS if variant.name in _NAMES)
_SAVED = 2  # steps before the checkpoint; the rest of BATCHES follow after it


def cases(options: Options) -> Iterator[Case]:
    """Yield the cases of this file."""
    for family in options.families:
        yield Case(name=f"manifest_{family}", check=partial(_manifest, family=family))
        yield Case(
            name=f"export_{family}",
            check=partial(_export, family=family),
            features=frozenset({Feature.HUGGINGFACE_EXPORT}),
        )
    first = options.families[0]
    for written, read, slow in ((1, 1, False), (2, 2, False), (2, 1, False), (1, 2, False), (2, 4, True)):
        yield Case(
            name=f"checkpoint_{written}_to_{read}",
            check=partial(_checkpoint, family=first, written=written, read=read),
            features=frozenset({Feature.RESHARDING} if written != read else ()),
            num_ranks=max(written, read),
            slow=slow,
        )
    yield from _of_variants(options)
    yield Case(
        name="checkpoint_lora",
        check=partial(_lora_checkpoint, family=first, num_ranks=options.fit(2)),
        features=frozenset({Feature.LORA}),
        num_ranks=options.fit(2),
    )
    remote = frozenset({Feature.REMOTE_CHECKPOINTS})
    yield Case(name="checkpoint_remote", check=partial(_remote, family=first), features=remote)
    yield Case(name="checkpoint_keep", check=partial(_keep, family=first))
    for num_ranks in (1, 2):
        yield Case(
            name=f"checkpoint_background_{num_ranks}",
            check=partial(_background, family=first, num_ranks=num_ranks),
            num_ranks=num_ranks,
        )
        yield Case(
            name=f"move_{num_ranks}",
            check=partial(_move, family=first, num_ranks=num_ranks),
            features=frozenset({Feature.OFFLOAD}),
            num_ranks=num_ranks,
        )


def _of_variants(options: Options) -> Iterator[Case]:
    """Yield a checkpoint in each way to train, of the first family that it is for."""
    for variant in (*_VARIANTS, *options.extra_variants):
        family = next(
            (name for name in options.families if name in (variant.families or options.families)), None
        )
        if family is None:
            continue
        written = variant.num_ranks if variant.exact else options.fit(variant.num_ranks)
        read = written if variant.exact else 1
        moved = {Feature.RESHARDING} if written != read else set[Feature]()
        yield Case(
            name=f"checkpoint_{variant.name}",
            check=partial(_checkpoint, family=family, written=written, read=read, variant=variant),
            features=variant.features | moved,
            num_ranks=written,
        )


def _checkpoint(runner: Runner, family: str, written: int, read: int, variant: Variant | None = None) -> None:
    """Save, load over other weights, step: the same as never having stopped."""
    job = runner.job(family) if variant is None else runner.job(family, variant.head, **variant.changes)
    folder = runner.folder()
    saved = runner.run(probes.save, written, job, BATCHES[:_SAVED], folder)[0]
    answers = runner.run(probes.resume, read, job, STALE, BATCHES[_SAVED:], folder)
    check_resumed(runner, runner.reference(job), answers, saved)


def _lora_checkpoint(runner: Runner, family: str, num_ranks: int) -> None:
    """The same with adapters, which start from what the seed draws."""
    job, folder = runner.job(family, lora=LORA), runner.folder()
    start: Record = runner.run(probes.train, num_ranks, job, [], (0,))[0]
    saved = runner.run(probes.save, num_ranks, job, BATCHES[:_SAVED], folder)[0]
    answers = runner.run(probes.resume, num_ranks, job, STALE, BATCHES[_SAVED:], folder)
    check_resumed(runner, runner.reference(job, adapter=start.weights_after[0]), answers, saved)


def check_resumed(
    runner: Runner,
    reference: Reference,
    answers: list[tuple[int | None, dict[str, torch.Tensor], Record]],
    saved: dict[str, torch.Tensor],
) -> None:
    """Compare what `probes.resume` answered with the weights saved, and its steps with the reference."""
    for rank, (found, loaded, record) in enumerate(answers):
        if found != _SAVED:
            raise AssertionError(f"`load_checkpoint` on rank {rank} should find step {_SAVED}, got {found}")
        check_tensors(f"weights on rank {rank} after loading", loaded, saved, 0.0)
        for rate, expected in zip(record.rates, reference.rates[_SAVED + 1 :], strict=False):
            check_number("learning rate after loading and a step", rate, expected, 1e-6)
        for number, loss in enumerate(record.losses, start=_SAVED):
            check_number(
                f"loss of step {number + 1}, after loading step {_SAVED}",
                loss,
                reference.losses[number],
                runner.tolerances.later_loss,
            )
        check_weights(runner, {STEPS: record.weights_after[STEPS - _SAVED]}, reference)


def _remote(runner: Runner, family: str) -> None:
    """A checkpoint copied to an fsspec URL loads where the local folder is gone."""
    job, folder, remote = runner.job(family), runner.folder(), f"file://{runner.folder()}"
    saved = runner.run(probes.save, 1, job, BATCHES[:_SAVED], folder, remote, 1)[0]
    shutil.rmtree(folder)
    answers = runner.run(probes.resume, 1, job, STALE, BATCHES[_SAVED:], runner.folder(), remote)
    check_resumed(runner, runner.reference(job), answers, saved)


def _background(runner: Runner, family: str, num_ranks: int) -> None:
    """A save that is not waited for is of the weights when it returned, though a step follows at once."""
    job, folder = runner.job(family), runner.folder()
    saved = runner.run(probes.save_and_go_on, num_ranks, job, BATCHES[: _SAVED + 1], folder)[0]
    answers = runner.run(probes.resume, num_ranks, job, STALE, BATCHES[_SAVED:], folder)
    check_resumed(runner, runner.reference(job), answers, saved)


def _keep(runner: Runner, family: str) -> None:
    """Only the newest checkpoints stay, the newest is found, and one that is cut short is passed over."""
    job, folder = runner.job(family), runner.folder()
    saved = runner.run(probes.save, 1, job, BATCHES[:_SAVED], folder, None, 1)[0]
    there = sorted(path.name for path in Path(folder).iterdir() if not path.name.startswith("."))
    if there != [f"step_{_SAVED}"]:
        raise AssertionError(f"with `max_ckpt_to_keep=1` {folder} should hold step_{_SAVED}, got {there}")
    Path(folder, f"step_{_SAVED + 1}").mkdir()  # what a crash might leave
    answers = runner.run(probes.resume, 1, job, STALE, BATCHES[_SAVED:], folder)
    check_resumed(runner, runner.reference(job), answers, saved)
    found, _, _ = runner.run(probes.resume, 1, job, [], BATCHES[:1], runner.folder())[0]
    if found is not None:
        raise AssertionError(f"`load_checkpoint` of a folder that does not exist should be None, got {found}")


def _manifest(runner: Runner, family: str) -> None:
    """`weight_manifest` says what `named_weights` yields, in the same order."""
    manifest, seen = runner.run(probes.describe, 1, runner.job(family))[0]
    for number in range(max(len(manifest), len(seen))):
        said = manifest[number] if number < len(manifest) else None
        got = seen[number] if number < len(seen) else None
        if said != got:
            raise AssertionError(f"entry {number} of the manifest is {said}, `named_weights` yields {got}")


def _export(runner: Runner, family: str) -> None:
    """The exported folder is a Hugging Face model with the streamed weights and the same predictions."""
    job, folder = runner.job(family), runner.folder()
    streamed = runner.run(probes.export, 1, job, BATCHES[:1], folder)[0]
    from safetensors.torch import load_file

    files: dict[str, torch.Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        files |= load_file(path)
    check_tensors("exported files", files, streamed, 0.0)
    with torch.no_grad():
        predictions = reference_logprobs(load_reference(folder), BATCHES[1])
    job = replace(job, config=replace(job.config, model=replace(job.config.model, path=folder)))
    got = runner.run(probes.score, 1, job, BATCHES[1])[0]
    check_tokens("engine on its own export", got, predictions, BATCHES[1], runner.tolerances.logprob)


def _move(runner: Runner, family: str, num_ranks: int) -> None:
    """Away to the CPU and back, in parts or whole, between all steps: nothing changes."""
    job = runner.job(family)
    for record, same in runner.run(probes.move, num_ranks, job, BATCHES, KEPT):
        if not same:
            raise AssertionError('`named_weights` gave other values after `to("cpu")` or after moving back')
        check_weights(runner, record.weights_after, runner.reference(job))
