"""Plans: what a version consists of, how it is cut and proven. Pure: no thread, no socket.

Read first: `manifest`, `buckets` and `digest`, then `ends.receiver` and `control.sync`: the idea in under 1,000 lines.
"""
