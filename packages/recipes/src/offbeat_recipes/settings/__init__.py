"""Settings: the tree, how it is read, and what plug-ins add to it."""
