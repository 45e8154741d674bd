"""The two ends of a weight transfer, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from anytron.engines.weight_stream import WeightStream

ENDS = Path(__file__).parent / "programs" / "ends.py"


@pytest.fixture
def stream(tmp_path):
    """Make the stream of a transfer, in small buckets."""

    def make(readers=1, name="transfer", timeout_s=30.0, bucket_bytes=4096):
        return WeightStream(str(tmp_path / name), readers, timeout_s, bucket_bytes)

    return make


@pytest.fixture
def start():
    """Start an end in a process; all that still run are killed after the test."""
    running = []

    def start(stream, end, *arguments):
        words = [stream.path, str(stream.readers), str(stream.timeout_s), str(stream.bucket_bytes), end, *arguments]
        process = subprocess.Popen(
            [sys.executable, str(ENDS), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()
