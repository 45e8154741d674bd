"""The training loops and their parts."""
