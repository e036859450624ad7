"""The two ends of a transfer: what a version consists of, how it is cut and proven; from tensors to buckets and back.

Read first: `manifest`, `buckets` and `digest` (pure: no thread, no socket), then `receiver` and `control.sync`: the idea in under
1,000 lines.
"""
