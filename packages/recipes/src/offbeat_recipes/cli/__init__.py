"""The command lines. Each has a `main` that returns the exit code; only these modules read the environment."""
