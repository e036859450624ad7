"""Where weights, moments and activations lie: over ranks, in host memory, in eight bits."""
