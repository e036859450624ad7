"""Measuring a machine's links, and what a sync over each of them takes."""

from __future__ import annotations
