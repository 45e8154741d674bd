"""Rollouts for the loop: prompts go in, responses come out, from any number of engines."""
