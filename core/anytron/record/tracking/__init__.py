"""The files that a run writes: metrics, samples, records, a plot."""
