"""What every engine needs and none should rewrite; FSDP2 and the engine of the docs are written on it.

Collectives that are plain functions on one rank, shares of a batch, micro-batches by budget, log-probabilities in chunks,
and checkpoint folders that are whole or absent.
"""
