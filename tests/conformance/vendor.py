"""Stands for a vendor's library."""

TILE = 16
TOLD = None
