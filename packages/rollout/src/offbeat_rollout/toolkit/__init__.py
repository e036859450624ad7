"""What adapters and the pool are made of: the pool of replicas with its routing, adapters by name, folders, texts that end."""
