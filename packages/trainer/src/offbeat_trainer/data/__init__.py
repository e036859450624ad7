"""The values of a run: prompts, groups, samples, seeds; and the protocols that its parts follow."""
