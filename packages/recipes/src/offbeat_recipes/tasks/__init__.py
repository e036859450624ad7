"""Tasks: where prompts come from and what a completion is worth."""
