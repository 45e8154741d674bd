"""A run of training: the loops, rollouts, and what is looked at before the first step."""
