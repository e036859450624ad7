"""What proves parts of your own: the contract of environments."""

from __future__ import annotations

from offbeat_trainer.testing.environments import check_environment

__all__ = ["check_environment"]
