"""What a run would be, checked before anything starts."""
