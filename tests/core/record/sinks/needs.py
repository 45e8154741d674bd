"""Marks for tests that need the package of a sink."""

import importlib.util

import pytest


def needs(package: str) -> list[pytest.MarkDecorator]:
    return [
        pytest.mark.sinks,
        pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed"),
        pytest.mark.filterwarnings("ignore"),  # those of what it imports
    ]
