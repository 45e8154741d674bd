"""What a run has left, read by whoever watches it: also while it goes on, and if it ended in the middle of a line."""
