"""What a run keeps: metrics, sinks, the report, checkpoints, validation."""
