"""Where the words of two packages meet: what a training engine exports and a rollout engine takes, as weight sync."""
