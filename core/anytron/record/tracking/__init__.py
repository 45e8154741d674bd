"""What a run leaves behind: metrics, samples, records, a plot."""
