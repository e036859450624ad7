"""Scripts that are processes of their own: `lockup.py` begins with Python alone, `verifiers.py` has packages of its own."""
