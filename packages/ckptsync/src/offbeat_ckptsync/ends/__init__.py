"""The two ends of a transfer: from named tensors to full buckets, and from buckets to verified weights."""
