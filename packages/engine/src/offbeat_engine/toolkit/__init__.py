"""What several engines need; FSDP2, Megatron and the engine of the docs are written on it.

`step.micro_batches` runs a call but for the model: global counts, hooks, losses, order, statistics, failures that all ranks agree
on; beside it are plans by budget, data shards, log-probabilities in chunks (`step.logprobs`, also of a vocabulary in shards).
`state.training_state` is checkpoints that are whole or absent, and move between layouts and engines. `hf` is for models of the
Hugging Face kind. `collectives` are plain functions on one rank.
"""
