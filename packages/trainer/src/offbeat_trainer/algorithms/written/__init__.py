"""Algorithms that learn from what is written down: examples, pairs, and completions with a verdict. Nothing is generated."""
