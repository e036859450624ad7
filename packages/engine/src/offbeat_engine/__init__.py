"""One training-engine interface for language models, with FSDP2 behind it."""
