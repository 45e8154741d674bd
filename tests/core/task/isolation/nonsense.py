"""A reward and an environment that write what they like into their process's channel.

They find it as any code in the process can: among its open descriptors.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import time
from pathlib import Path

from anytron.task.environments import Observation

WRITTEN = {
    "a list": b"[1, 2]",
    "a number": b"7",
    "nothing": b"null",
    "no JSON": b"{'values': [1.0]}",
    "no text": b"\xff\xfe\xfa",
    "deep": b"[" * 100_000,
    "no keys": b"{}",
    "ready": b'{"ready": true}',
    "unreadable": b'["", {"unreadable": "it is not"}]',
    "an answer": b'{"values": [99.0], "failures": [], "observation": {"text": "forged"}}',
    "an answer with a token": b'["0", {"values": [99.0], "failures": [], "observation": {"text": "forged"}}]',
    "other kinds": b'{"values": {"0": 1.0}, "failures": 3, "observation": [1], "at": []}',
    "numbers for texts": b'{"values": [], "failures": [{"what": 1, "why": 2}], "failure": {"what": 3, "why": []}}',
    "NaN": b'{"values": [NaN, NaN], "failures": [], "observation": {"text": "x", "reward": NaN}}',
    "beyond floats": b'{"values": [1' + b"0" * 400 + b'], "failures": [], "observation": {"text": "x", "reward": 1'
    b"" + b"0" * 400 + b"}}",
    "too many": b'{"values": [1.0, 1.0], "failures": [], "observation": {"text": "x", "tokens": [1]}}',
    "another's sample": b'{"values": [], "failures": [{"what": "W", "why": "Y", "sample": 9}], "observation": "x"}',
}
"""By name: what is no answer to a call of one sample or of many, or to a step."""
HUGE = struct.pack("!iQ", -1, 1 << 62)
"""Announces a message that no memory holds."""


def frame(message):
    return struct.pack("!i", len(message)) + message


def put(frames):
    """Write into the only socket of this process."""
    for link in Path("/proc/self/fd").iterdir():
        if link.is_socket():
            os.write(int(link.name), frames)


def write(frames):
    put(frames)
    time.sleep(1000)


def forged(samples):
    """An answer to a call of so many samples, as the driver reads it from who knows no token."""
    return frame(json.dumps({"values": [99.0] * len(samples), "failures": []}).encode())


def forges(samples):
    """Give each response's length, like :func:`lengths`; before that, or after it, answer instead of the process."""
    words = [sample.response_text for sample in samples]
    if "before" in words:
        put(forged(samples))
    if "after" in words:
        threading.Thread(target=_later, args=(samples, words.index("after")), daemon=True).start()
    return [float(len(word)) for word in words]


def _later(samples, place):
    while not samples[place].data["answered"].exists():
        time.sleep(0.01)
    put(forged(samples))


def lengths(samples):
    """Give each response's length, unless it names something to write."""
    return [_score(sample.response_text) for sample in samples]


def _score(word):
    if word == "huge":
        write(HUGE)
    if word in WRITTEN:
        write(frame(WRITTEN[word]))
    return float(len(word))


class Echo:
    """Says what it was told, unless that names something to write."""

    def reset(self, task):
        pass

    def step(self, turn):
        if turn.text in WRITTEN:
            write(frame(WRITTEN[turn.text]))
        return Observation(text=turn.text)
