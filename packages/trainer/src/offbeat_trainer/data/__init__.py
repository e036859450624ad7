"""The values of a run: prompts, groups, samples, seeds."""
