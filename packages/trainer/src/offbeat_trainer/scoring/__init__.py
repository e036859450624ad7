"""What completions are worth: reward functions of users, called where they can neither block nor end the run."""
