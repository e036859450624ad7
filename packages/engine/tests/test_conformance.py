"""The FSDP2 engine through the conformance suite, as any engine would go through it."""

import pytest

from offbeat_engine.fsdp2 import Fsdp2Engine, sharding
from offbeat_engine.testing import conformance

TestFsdp2 = conformance("fsdp2", slow=pytest.mark.slow)


class LayeredFsdp2(Fsdp2Engine):
    """Shards every layer by itself, as it does with models that are not tiny."""

    def init_model(self):
        kept, sharding.SMALL_MODEL_BYTES = sharding.SMALL_MODEL_BYTES, 0
        try:
            super().init_model()
        finally:
            sharding.SMALL_MODEL_BYTES = kept


Layered = conformance(LayeredFsdp2, families=["llama_tied"], num_ranks=2)


class TestLayered(Layered):
    """Where it makes a difference: training and checkpoints on two ranks."""


for name in [name for name in vars(Layered) if name.startswith("test_")]:
    if not name.startswith(("test_training", "test_checkpoint", "test_lora")):
        delattr(Layered, name)
del Layered
