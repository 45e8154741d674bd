"""A training run: the loops, rollouts, and the checks before the first step."""
