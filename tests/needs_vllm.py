"""Marks for tests that need vLLM, and the torchvision that those need whose models take images."""

import os
from importlib.util import find_spec

import pytest

from anytron_vllm.installation import find_installation
from tests.house import ROOT

TORCHVISION = os.environ.get("ANYTRON_TORCHVISION")
"""A folder with a torchvision for another torch than the one that is installed (tox.ini, environment ``vllm``)."""
WITH_TORCHVISION = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(
        [
            *([str(ROOT / "tests/torchvision_operators"), TORCHVISION] if TORCHVISION else []),
            str(ROOT),
            *filter(None, [os.environ.get("PYTHONPATH")]),
        ]
    ),
}
"""The environment of a process that has torchvision."""
NEEDS_VLLM = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_installation() is None, reason="vLLM is not installed"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, and those of what it imports
]
NEEDS_TORCHVISION = pytest.mark.skipif(
    not TORCHVISION and find_spec("torchvision") is None, reason="neither torchvision nor ANYTRON_TORCHVISION is there"
)
