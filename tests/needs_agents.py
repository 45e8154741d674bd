"""Marks for tests that need the frameworks of agents (tox -e agents)."""

import importlib.util

import pytest

from anytron_verifiers.release import EPISODES, installed

FRAMEWORKS = ("langchain", "langchain_openai", "mcp", "smolagents")

NEEDS_AGENTS = [
    pytest.mark.agents,
    pytest.mark.skipif(
        not installed(EPISODES) or any(importlib.util.find_spec(one) is None for one in FRAMEWORKS),
        reason="the frameworks of tox -e agents are not installed",
    ),
    pytest.mark.filterwarnings("ignore"),  # those of what the frameworks import
]
