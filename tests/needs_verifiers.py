"""Marks for tests that need the library verifiers."""

import pytest

from anytron_verifiers.release import TURNS, installed

NEEDS_VERIFIERS = [
    pytest.mark.verifiers,
    pytest.mark.skipif(not installed(TURNS), reason="no verifiers below 0.4 that is supported is installed"),
    pytest.mark.filterwarnings("ignore"),  # those of what verifiers imports
]
