"""The training loops. Each reads like its own table of contents; they share the parts in `offbeat_trainer`."""
