"""From a prompt to a scored group: in one turn, or in several with an environment; rewards of users can neither block nor end the run."""
