"""From named tensors to full buckets."""
