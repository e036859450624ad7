"""Members and sources over sockets, for who has no Ray."""
