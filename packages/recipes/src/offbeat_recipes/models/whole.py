"""Model folders that are there whole or not at all, and models of somebody's shape with fresh weights."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def make_whole(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write a folder beside `folder` and rename it last; whoever finds `folder` finds it whole.

    Another process may make the same folder at the same time: the first one wins, the other's is dropped.
    """
    beside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)  # of a killed process that had the same id
    beside.mkdir(parents=True)
    try:
        fill(beside)
        _put(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)  # gone already if it was put in place


def random_model_folder(shape: Path, cache_dir: Path, seed: int, *, trust_remote_code: bool = False) -> Path:
    """Return a Hugging Face folder with the config and tokenizer of `shape` and weights drawn from `seed`.

    Made in `cache_dir` where it is not there yet; two calls with one seed give the same weights.
    """
    folder = cache_dir / f"random-{seed}"
    if folder.exists():
        return folder

    def fill(beside: Path) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            trust: dict[str, Any] = {"trust_remote_code": trust_remote_code}
            made = cast("Any", AutoConfig).from_pretrained(shape, **trust)
            AutoModelForCausalLM.from_config(made, **trust).save_pretrained(beside)
        for file in shape.iterdir():
            if "token" in file.name or file.suffix in {".jinja", ".model"}:
                shutil.copy(file, beside)

    make_whole(folder, fill)
    return folder


def _put(beside: Path, folder: Path) -> None:
    try:
        beside.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
