"""What every part stands on: settings, the operations as a table, values as JSON, a key-value store, threads."""
