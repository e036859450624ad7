"""The model as megatron-core builds it: layers, attention over contexts in parts, Transformer Engine."""
