"""Engines that take weights through their own update calls."""
