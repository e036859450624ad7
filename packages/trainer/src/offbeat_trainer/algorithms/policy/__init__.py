"""Algorithms that are GRPO with another advantage or another surrogate, by name."""
