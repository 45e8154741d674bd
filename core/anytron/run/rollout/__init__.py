"""Rollouts as the loop sees them: prompts go in, responses come out, whatever number of engines makes them."""
