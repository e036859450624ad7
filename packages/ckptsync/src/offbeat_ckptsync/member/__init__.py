"""One receiving rank."""
