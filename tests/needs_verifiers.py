"""Marks for tests that need the library verifiers."""

import pytest

from anytron.base.errors import ConfigError
from anytron_verifiers.source import require_supported


def missing() -> bool:
    try:
        require_supported()
    except ConfigError:
        return True
    return False


NEEDS_VERIFIERS = [
    pytest.mark.verifiers,
    pytest.mark.skipif(missing(), reason="no verifiers that is supported is installed"),
    pytest.mark.filterwarnings("ignore"),  # those of what verifiers imports
]
