"""Read a run's files to show them, even if the run goes on or ended in the middle of a line."""
