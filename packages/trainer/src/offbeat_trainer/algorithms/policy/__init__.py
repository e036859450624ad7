"""Policy losses of published algorithms, by what one decision looks at: a token, a sequence, or the whole batch."""
