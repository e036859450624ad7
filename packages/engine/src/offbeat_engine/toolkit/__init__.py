"""What every engine needs and none should rewrite; FSDP2 and the engine of the docs are written on it.

`micro_batches` runs a call but for the model: global counts, hooks, losses, order, statistics, failures that all ranks agree
on. Besides it: collectives that are plain functions on one rank, shares of a batch, plans by budget, log-probabilities in
chunks, checkpoint folders that are whole or absent, and `training_state`: checkpoints that move between layouts and engines.
"""
