"""The command line: ``anytron``."""
