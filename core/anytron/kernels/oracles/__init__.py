"""Oracles: slow and obviously right, written from the definition, for tests of fast code."""
