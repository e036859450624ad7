"""Rewards and environments that are ready to be named in settings, and adapters of those that others wrote."""
