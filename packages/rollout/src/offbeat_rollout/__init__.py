"""Generation adapters for RL: vLLM and a plain Transformers reference."""
