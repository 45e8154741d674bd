"""Read a run's files to show them: also while the run goes on, and if it ended in the middle of a line."""
