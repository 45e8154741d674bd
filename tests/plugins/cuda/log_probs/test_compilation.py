"""The Triton kernels of log-probs compile for every kind of GPU that gets them, and fit it. No GPU is needed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
PROGRAM = Path(__file__).parent / "compile_for.py"
SHARED_BYTES = {
    "80": 163 * 1024,
    "86": 99 * 1024,
    "89": 99 * 1024,
    "90": 227 * 1024,
    "100": 227 * 1024,
    "120": 99 * 1024,
}
"""Of a block at most, by compute capability (CUDA C++ Programming Guide, table "Technical Specifications")."""


@pytest.mark.triton
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton: tox -e triton")
@pytest.mark.timeout(300)
def test_they_fit_every_gpu_that_gets_them(tmp_path):
    places = os.pathsep.join(str(ROOT / part) for part in ("core", "backends", "plugins/cuda"))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": places, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, PROGRAM, *SHARED_BYTES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for capability, kernels in json.loads(done.stdout).items():
        for name, taken in kernels.items():
            assert taken["shared_bytes"] <= SHARED_BYTES[capability], (capability, name, taken)
            assert taken["registers"] <= 255, (capability, name, taken)
            assert taken["spilled_bytes"] <= 16, (capability, name, taken)  # more would be the slowness of memory
