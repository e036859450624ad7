"""Verified, transactional weight sync between a trainer and its generation replicas."""
