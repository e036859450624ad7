"""Models of the Hugging Face kind: rows, files, rotary limits, and what is compared before training."""
