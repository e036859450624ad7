"""The FSDP2 engine through the conformance suite, as any engine would go through it."""

from dataclasses import replace

import pytest

from offbeat_engine.config import Feature
from offbeat_engine.fsdp2 import Fsdp2Engine
from offbeat_engine.fsdp2.model.building import compiler_missing
from offbeat_engine.testing import conformance
from offbeat_engine.testing.models import FAMILIES, VARIANTS, Variant
from offbeat_engine.testing.runner import Tolerances
from offbeat_engine.testing.suite import cases

pytestmark = pytest.mark.spawns

# Its other kernel for packed rows; on a CPU plain PyTorch stands in for the GPU's part of it.
VARLEN = Variant(name="varlen", changes={"attention": "varlen"}, features=frozenset({Feature.PACKING}))

TestFsdp2 = conformance("fsdp2", extra_variants=[VARLEN], slow=pytest.mark.slow, deep=pytest.mark.deep)

# What compiling lacks on this machine is refused by name, which the suite would take for a broken declaration.
if (lack := compiler_missing("cpu")) is not None:
    for name in [one for one in dir(TestFsdp2) if one.endswith("_compiled")]:
        setattr(TestFsdp2, name, pytest.mark.skip(reason=lack)(getattr(TestFsdp2, name)))

# The same reference, on a device that adds up in another order; the bfloat16 cases are held against a plain bfloat16
# model's own error there, as everywhere. Run on an H200.
ON_A_GPU = Tolerances(
    logprob=1e-4, loss=1e-5, later_loss=1e-4, gradient=1e-3, norm=1e-4, step_weight=1e-2, bfloat16=2.0
)
TestFsdp2OnOneGpu = pytest.mark.gpu(1)(
    conformance(
        "fsdp2", device="cuda", num_ranks=1, slow=pytest.mark.slow, deep=pytest.mark.deep, tolerances=ON_A_GPU
    )
)
# Layouts of several ranks are declared, and cannot be seen on one.
TestFsdp2OnOneGpu.test_declaration = None


def test_every_family_and_every_way_to_train_is_in_the_usual_tier():
    usual = [case for case in cases(TestFsdp2.options) if not case.deep]
    names = [case.name for case in usual]
    assert len(usual) < len(cases(TestFsdp2.options)) / 2
    for family in FAMILIES:
        assert {f"training_{family}_one_rank", f"manifest_{family}", f"export_{family}"} <= {*names}
    for variant in (*VARIANTS, VARLEN):
        assert f"training_qwen2_{variant.name}" in names
    capabilities = Fsdp2Engine.capabilities()
    asked = frozenset().union(*(case.features for case in usual))
    assert capabilities.features <= asked
    assert asked - capabilities.features <= {*capabilities.missing}


class LayeredFsdp2(Fsdp2Engine):
    """Shards every layer by itself, as it does with models that are not tiny."""

    def __init__(self, config, world):
        super().__init__(replace(config, reshard="always"), world)


Layered = conformance(LayeredFsdp2, families=["llama_tied", "qwen3_moe"], num_ranks=4)


class TestLayered(Layered):
    """Where it makes a difference: training, checkpoints and adapters, of a dense model and of a mixture."""


USUAL = ("two_ranks", "lora_llama_tied", "lora_qwen3_moe", "checkpoint_lora")
DENSE = ("one_at_a_time", "activations_away", "offloaded", "sequence_2", "values", "2_to_1")
USUAL += tuple(f"llama_tied_{name}" for name in DENSE)
for name, case in [pair for pair in vars(Layered).items() if pair[0].startswith("test_")]:
    if not name.startswith(("test_training", "test_checkpoint", "test_lora")):
        delattr(Layered, name)
    elif not name.endswith(USUAL):
        setattr(Layered, name, pytest.mark.deep(case))
del Layered
