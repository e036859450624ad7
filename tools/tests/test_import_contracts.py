"""Each import contract is kept by its exceptions and broken by a planted import, hidden or not."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

PLAIN = "import {module}\n"
IN_FUNCTION = "def later() -> None:\n    import {module}\n"
TYPE_ONLY = "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    import {module}\n"

FLOORS = "Packages depend only downward, and the three on the ground are strangers"
CYCLES = "No cycles inside a package"
CKPTSYNC = "ckptsync: toolkit < ends < transports < control < adapters"
TRAINER = "trainer: data < algorithms < watch < rollouts < loops"
RECIPES = "recipes: settings < planning < report < run < cli"
RAY = "Ray only in offbeat_trainer.cluster"
HYDRA = "Hydra and omegaconf only in offbeat_recipes"
VLLM = "vLLM only in its adapters"
SGLANG = "SGLang only in its adapters"
MEGATRON = "Megatron only in its engine"

VIOLATIONS = [
    (FLOORS, "engine", "planted", "offbeat_ckptsync.values", TYPE_ONLY),
    (FLOORS, "rollout", "planted", "offbeat_engine.config", IN_FUNCTION),
    (FLOORS, "ckptsync", "planted", "offbeat_trainer.config", PLAIN),
    (FLOORS, "trainer", "planted", "offbeat_recipes", IN_FUNCTION),
    (CKPTSYNC, "ckptsync", "toolkit.planted", "offbeat_ckptsync.control.manager", TYPE_ONLY),
    (CKPTSYNC, "ckptsync", "ends.planted", "offbeat_ckptsync.transports.shm", IN_FUNCTION),
    (TRAINER, "trainer", "rollouts.planted", "offbeat_trainer.loops.online", TYPE_ONLY),
    (TRAINER, "trainer", "data.planted", "offbeat_trainer.algorithms.grpo", IN_FUNCTION),
    (RECIPES, "recipes", "settings.planted", "offbeat_recipes.planning.memory", TYPE_ONLY),
    (RECIPES, "recipes", "planning.planted", "offbeat_recipes.run.folder", IN_FUNCTION),
    (RAY, "engine", "planted", "ray", IN_FUNCTION),
    (RAY, "recipes", "planted", "ray", TYPE_ONLY),
    (RAY, "trainer", "planted", "ray.actor", IN_FUNCTION),
    (HYDRA, "trainer", "planted", "hydra", IN_FUNCTION),
    (HYDRA, "engine", "planted", "omegaconf", TYPE_ONLY),
    (VLLM, "rollout", "planted", "vllm.sampling_params", IN_FUNCTION),
    (VLLM, "trainer", "cluster.planted", "vllm", TYPE_ONLY),
    (SGLANG, "rollout", "planted", "sglang", IN_FUNCTION),
    (MEGATRON, "trainer", "planted", "megatron.core", IN_FUNCTION),
]

ALLOWED = [
    ("trainer", "cluster.planted", "ray"),
    ("recipes", "planted", "hydra"),
    ("recipes", "planted_too", "omegaconf"),
    ("rollout", "vllm.planted", "vllm"),
    ("ckptsync", "adapters.vllm.planted", "vllm"),
    ("rollout", "sglang.planted", "sglang"),
    ("engine", "megatron.planted", "megatron.core"),
    ("trainer", "planted", "offbeat_engine.config"),
]


def plant(checkout, package: str, module: str, text: str) -> str:
    """Write a module into the copy, with the packages it lies in, and return its full name."""
    folder = checkout.root / "packages" / package / "src" / f"offbeat_{package}"
    *parents, name = module.split(".")
    for parent in parents:
        folder /= parent
        folder.mkdir(exist_ok=True)
        init = folder / "__init__.py"
        init.touch()
    (folder / f"{name}.py").write_text(text)
    return f"offbeat_{package}.{module}"


def lint(checkout):
    return checkout.run("lint-imports", "--no-cache", "--no-logo")


@pytest.mark.parametrize(("contract", "package", "module", "imported", "form"), VIOLATIONS)
def test_a_planted_import_breaks_its_contract(checkout, contract, package, module, imported, form):
    planted = plant(checkout, package, module, form.format(module=imported))
    after = lint(checkout)
    assert after.returncode == 1
    assert f"{contract} BROKEN" in after.stdout
    # import-linter knows packages from outside by their first name only
    shown = imported if imported.startswith("offbeat_") else imported.partition(".")[0]
    assert f"{planted} -> {shown}" in " ".join(after.stdout.split())


def test_a_cycle_of_hidden_imports_breaks_its_contract(checkout):
    plant(checkout, "engine", "planted_a", TYPE_ONLY.format(module="offbeat_engine.planted_b"))
    assert f"{CYCLES} KEPT" in lint(checkout).stdout
    plant(checkout, "engine", "planted_b", IN_FUNCTION.format(module="offbeat_engine.planted_a"))
    after = lint(checkout)
    assert after.returncode == 1
    assert f"{CYCLES} BROKEN" in after.stdout
    assert "planted_a" in after.stdout


def test_the_homes_of_heavy_libraries_may_import_them(checkout):
    for package, module, imported in ALLOWED:
        plant(checkout, package, module, IN_FUNCTION.format(module=imported))
    said = lint(checkout).stdout
    assert "planted" not in said
    assert "BROKEN" not in said


def test_every_contract_is_broken_by_a_test(checkout):
    root: Path = checkout.root
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]
    names = {contract["name"] for contract in settings["contracts"]}
    assert names == {CYCLES} | {contract for contract, *_ in VIOLATIONS}
