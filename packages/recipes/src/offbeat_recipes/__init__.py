"""Hydra entrypoints, tasks and rewards: where Offbeat is composed."""
