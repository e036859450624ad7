"""One call of a step, but for the model."""
