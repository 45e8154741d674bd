"""The ground floor: errors, files, seeds, metrics, the terminal."""
