"""Checkpoints on disk: what they hold and when they are complete, whatever the engine."""
