"""What a run must not forget: every group's way from its prompt into a step, as a log of events."""
