"""Attention over packed rows, and rows cut among ranks."""
