"""The model that is trained: built, compiled, computed again, and asked for log-probabilities."""
