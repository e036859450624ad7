"""A model of somebody's shape with fresh weights: for benchmarks, dry runs and pre-training."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from offbeat_recipes.models.whole import make_whole

if TYPE_CHECKING:
    from pathlib import Path


def random_model_folder(shape: Path, cache_dir: Path, seed: int) -> Path:
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
            AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(shape)).save_pretrained(beside)
        for file in shape.iterdir():
            if "token" in file.name or file.suffix in {".jinja", ".model"}:
                shutil.copy(file, beside)

    make_whole(folder, fill)
    return folder
