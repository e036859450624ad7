"""What several engines need; FSDP2, Megatron and the engine of the docs are written on it.

`micro_batches` runs a call but for the model: global counts, hooks, losses, order, statistics, failures that all ranks agree
on. Besides it: collectives that are plain functions on one rank, shares of a batch, plans by budget, log-probabilities in
chunks, checkpoint folders that are whole or absent, and `training_state`: checkpoints that move between layouts and engines.
`layouts`, `probing`, `replaying`, `rotary`, `throughput` and `weight_files` are for models of the Hugging Face kind; `vocab_shards` is for a vocabulary in shards.
"""
