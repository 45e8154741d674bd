"""Oracles: slow and simple reference implementations, written from the definition, for tests of fast code."""
