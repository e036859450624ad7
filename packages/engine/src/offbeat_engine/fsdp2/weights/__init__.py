"""Weights by their Hugging Face names: read, converted, adapted, streamed and written."""
