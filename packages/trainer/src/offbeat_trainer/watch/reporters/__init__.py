"""Where a run tells what is going on: console, JSONL, TensorBoard, Weights & Biases, or several at once."""
