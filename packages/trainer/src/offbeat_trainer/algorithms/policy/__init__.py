"""Algorithms that are GRPO with other advantages or another loss; losses by what one decision looks at: a token, a sequence, or the batch."""
