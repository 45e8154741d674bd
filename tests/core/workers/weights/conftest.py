"""Weight transfers, and their two ends in processes of their own."""

from __future__ import annotations

import base64
import contextlib
import pickle
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from anytron.workers.weights.memory import SharedMemory
from anytron.workers.weights.network import LOOPBACK, NetworkMeeting
from anytron.workers.weights.stream import WeightStream

if TYPE_CHECKING:
    from anytron.workers.weights.buckets import Meeting

ENDS = Path(__file__).parent / "programs" / "ends.py"
WAYS = ("shared_memory", "network")


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def collect(origin):
    """Put tensors together from their pieces, as raw bytes: name -> (dtype, shape, optional, bytes)."""
    found = {}
    with origin.open() as weights:
        for piece in weights:
            values = bits(piece.values).clone()
            if piece.name not in found:
                assert piece.start == 0
                found[piece.name] = (piece.values.dtype, piece.shape, piece.optional, values)
            else:
                *_, before = found[piece.name]
                assert piece.start == len(before) // piece.values.element_size()
                found[piece.name] = (*found[piece.name][:3], torch.cat([before, values]))
        return weights.version, found


@dataclass
class Transfer:
    """A transfer as the driver sees it."""

    meeting: Meeting
    readers: int
    timeout_s: float
    bucket_bytes: int

    @property
    def stream(self):
        return WeightStream(self.meeting.sender, self.readers, self.timeout_s, self.bucket_bytes)

    @cached_property
    def carrier(self):
        """What readers are told, once the sender listens."""
        while (carrier := self.meeting.reader()) is None:
            pass
        return carrier

    def origin(self, reader):
        return self.stream.origin(self.carrier, reader)


def new_meeting(way, folder, name="transfer"):
    return SharedMemory(str(folder / name)) if way == "shared_memory" else NetworkMeeting(LOOPBACK, LOOPBACK)


@pytest.fixture(params=WAYS)
def way(request):
    return request.param


@pytest.fixture
def new_transfer(tmp_path, way):
    """Make transfers in small buckets."""
    with contextlib.ExitStack() as opened:

        def make(readers=1, name="transfer", timeout_s=30.0, bucket_bytes=4096):
            meeting = opened.enter_context(new_meeting(way, tmp_path, name))
            return Transfer(meeting, readers, timeout_s, bucket_bytes)

        yield make


@pytest.fixture
def start():
    """Start an end in a process; all that still run are killed after the test."""
    running = []

    def start(end, *arguments):
        process = subprocess.Popen(
            [sys.executable, str(ENDS), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        running.append(process)
        process.stdin.write(f"{base64.b64encode(pickle.dumps(end)).decode()}\n")
        process.stdin.flush()
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()
