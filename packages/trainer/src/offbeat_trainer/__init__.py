"""Training loops, algorithms and the Ray cluster of Offbeat."""
