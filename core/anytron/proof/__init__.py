"""Checks before training: the conformance kit of platforms, ``anytron verify``, ``doctor`` and ``plan``."""
