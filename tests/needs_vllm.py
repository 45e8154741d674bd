"""Marks for tests that need vLLM."""

import pytest

from anytron_vllm.installation import find_installation

NEEDS_VLLM = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_installation() is None, reason="vLLM is not installed"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, and those of what it imports
]
