"""What all other packages use: errors, files, seeds, metrics, the terminal."""
