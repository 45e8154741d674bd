"""Checkpoints on disk: what they hold and when they are complete. Knows no engine."""
