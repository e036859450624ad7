"""Models made on the spot."""
