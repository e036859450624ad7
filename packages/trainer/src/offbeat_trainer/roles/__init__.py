"""The models of an algorithm, each on any training engine."""
