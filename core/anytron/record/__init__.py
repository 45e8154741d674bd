"""What a run records: metrics and their sinks, reports, checkpoints and validation results."""
