"""Executors, which start, watch and end the processes of engines."""
