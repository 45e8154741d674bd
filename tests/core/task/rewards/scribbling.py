"""Rewards that write into the memory in which their process notes how far it has come.

They find it as any code in the process can: among its open descriptors.
"""

from __future__ import annotations

import os
import random
import struct
import threading
import time
from pathlib import Path

RECORD = struct.Struct("dq")
"""When, and where: as the driver reads it."""
NUMBERS = {
    "far ahead": (1e300, 2**63 - 1),
    "never": (float("inf"), 2**62),
    "no number": (float("nan"), 1 << 40),
    "long ago": (-1e300, -(2**63)),
    "the beginning": (0.0, -1),
}
WRITTEN = []
"""Set whenever the thread of this process has written."""


def shared_memory() -> int:
    """A descriptor of the memory."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return int(next(link.name for link in links if str(link.readlink()).startswith("/memfd:anytron-progress")))


def scribbles(samples, numbers):
    """Give each response's length, while a thread writes; what the response says is done to the process."""
    if not WRITTEN:
        WRITTEN.append(threading.Event())
        threading.Thread(target=_write, args=(numbers,), daemon=True).start()
    return [_done(sample.response_text) for sample in samples]


def _write(numbers):
    descriptor, draw = shared_memory(), random.Random(numbers)
    while True:
        record = RECORD.pack(*NUMBERS[numbers]) if numbers in NUMBERS else draw.randbytes(RECORD.size)
        os.pwrite(descriptor, record, 0)
        WRITTEN[0].set()
        time.sleep(1e-4)


def _done(word):
    for _ in range(2):  # the first may have been under way before the sample was noted
        WRITTEN[0].clear()
        WRITTEN[0].wait()
    if word == "hangs":
        time.sleep(1000)
    if word == "dies":
        os._exit(7)
    return float(len(word))


def truncates(samples):
    """Try to take the memory away under the driver, and hang."""
    os.ftruncate(shared_memory(), 0)
    time.sleep(1000)
    return [0.0] * len(samples)


def runs_in_circles(samples):
    """Take the samples again and again, if one of them says so."""
    lengths = [float(len(sample.response_text)) for sample in samples]
    while any(sample.response_text == "circles" for sample in samples):
        time.sleep(0.01)
    return lengths
