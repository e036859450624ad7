"""The FSDP2 engine through the conformance suite, as any engine would go through it."""

import pytest

from offbeat_engine.testing import conformance

TestFsdp2 = conformance("fsdp2", slow=pytest.mark.slow)
