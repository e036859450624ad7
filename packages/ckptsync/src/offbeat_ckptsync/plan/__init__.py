"""Plans: what a version consists of, how it is cut and proven. Pure: no thread, no socket. Read first."""
