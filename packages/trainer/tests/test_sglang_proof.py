"""offbeat-rollout and offbeat-ckptsync prove what an SGLang server holds by the same file, of which each has a copy."""

from __future__ import annotations

import inspect

from offbeat_ckptsync.adapters.sglang import proof as of_ckptsync
from offbeat_rollout.sglang import proof as of_rollout


def test_the_two_copies_are_one():
    assert inspect.getsource(of_ckptsync) == inspect.getsource(of_rollout)
