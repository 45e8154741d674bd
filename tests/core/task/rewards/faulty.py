"""Rewards that misbehave when a response holds a certain word; every other response gets its length.

For tests of whole runs too: ``rewards[].function=tests/core/task/rewards/faulty.py:faulty``. ``always`` is the way to
misbehave without that word.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time

HOARD = []


def raises():
    raise LookupError("no opinion")


def hangs():
    time.sleep(1000)


def hangs_with_the_lock():
    re.match(r"(a+)+$", "a" * 60 + "b")


def exits():
    sys.exit(3)


def dies():
    os._exit(7)


def kills_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def crashes():
    ctypes.string_at(0)


def stops():
    os.kill(os.getpid(), signal.SIGSTOP)


def eats():
    while True:
        HOARD.append(bytearray(1 << 26))


def gives_nan():
    return float("nan")


def gives_nothing():
    return None


def leaves_a_child():
    child = subprocess.Popen(["sleep", "1000"])
    print("child", child.pid, flush=True)
    hangs()


FAULTS = {
    function.__name__: function
    for function in (
        *(raises, hangs, hangs_with_the_lock, exits, dies, kills_itself),
        *(crashes, stops, eats, gives_nan, gives_nothing, leaves_a_child),
    )
}


def faulty(samples, always=None):
    """Give each response's length, unless its text names one of FAULTS."""
    return [_score(always or sample.response_text.strip(), sample) for sample in samples]


def _score(word, sample):
    return FAULTS[word]() if word in FAULTS else float(len(sample.response_text))


def rank_in_group(samples):
    """Compare the responses to one prompt: the longest gets the number of the others. Needs all of them in one call."""
    return [
        sum(len(other.response_text) < len(one.response_text) for other in samples if other.prompt_id == one.prompt_id)
        for one in samples
    ]


def whole_list(samples):
    """Give each sample the number of samples of its call."""
    return [float(len(samples))] * len(samples)


def pids(samples):
    """Say who answers."""
    return [float(os.getpid())] * len(samples)
