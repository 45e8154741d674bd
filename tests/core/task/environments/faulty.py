"""An environment that counts its turns, and misbehaves when the model writes a certain word."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

from anytron.task.environments import Observation

HOARD = []
SLOW_S = 0.4


def raises():
    raise LookupError("no opinion")


def hangs():
    time.sleep(1000)


def slow():
    time.sleep(SLOW_S)
    return Observation(text="late")


def dies():
    os._exit(7)


def exits():
    sys.exit(3)


def eats():
    while True:
        HOARD.append(bytearray(1 << 26))


def returns_a_text():
    return "85"


def says_nothing():
    return Observation()


def gives_nan():
    return Observation(text="x", reward=float("nan"))


class Counter:
    """Answers with its number of turns and what it was told, and ends when it is told to."""

    def __init__(self, sign="#", fail_at_reset=None, closed=None, forgetful=False):
        self.sign, self.fail_at_reset, self.closed, self.forgetful = sign, fail_at_reset, closed, forgetful

    def reset(self, task):
        self.task, self.turns = task, 0
        self.draw = random.Random(None if self.forgetful else task.seed)
        if self.fail_at_reset:
            globals()[self.fail_at_reset]()

    def step(self, turn):
        self.turns += 1
        if callable(globals().get(turn.text)):
            return globals()[turn.text]()
        if turn.text == "note":
            self.task.data["notes"].append(self.task.prompt_id)
            return Observation(messages=[{"role": "tool", "content": note} for note in self.task.data["notes"]])
        if turn.text == "end":
            return Observation(done=True, reward=1.0, metrics={"ends": 1})
        said = f"{self.task.prompt_id}{self.sign}{self.turns}:{turn.text}:{self.draw.random()}"
        return Observation(text=said, reward=0.5, metrics={"pid": os.getpid()})

    def close(self):
        if self.closed:
            with Path(self.closed).open("a") as file:
                file.write(f"{self.task.prompt_id}\n")


class NoStep:
    def reset(self, task): ...
