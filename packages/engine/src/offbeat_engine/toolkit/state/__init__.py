"""Checkpoints that are whole or absent, and move between layouts and engines."""
