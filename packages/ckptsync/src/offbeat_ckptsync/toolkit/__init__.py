"""What every part stands on: the operations as a table, values as JSON, a key-value store, threads."""
