# pyright: basic
"""Processes of a sync that can be hurt, and hosts that can be cut off: for tests of several packages, shipped with none."""
