"""Servers for tests."""

from __future__ import annotations

import pytest

from tests.core.serving.served import served


@pytest.fixture(scope="module")
def one():
    with served() as server:
        yield server


@pytest.fixture
def fresh():
    with served(seed=3) as server:
        yield server
