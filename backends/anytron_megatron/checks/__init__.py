"""Checks of a run against what Megatron can train, before anything starts. Nothing here imports Megatron."""
