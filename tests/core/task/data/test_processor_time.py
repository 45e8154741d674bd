"""Code that a model brings is interrupted, wherever it is."""

import gc
import sys
import time

import pytest

from anytron.task.data.processor_time import processor_time


def compute(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        sum(range(10_000))  # to ask for the time is the system's time, which is not counted


def test_waiting_does_not_count_and_nothing_is_left_behind():
    with processor_time(0.1):
        time.sleep(0.2)

    compute(0.2)
    assert gc.isenabled()


def test_an_error_that_a_destructor_swallows_is_raised_again(monkeypatch):
    swallowed = []
    monkeypatch.setattr(sys, "unraisablehook", swallowed.append)

    class Slow:
        def __del__(self):
            compute(0.3)

    def run() -> None:
        Slow()
        compute(10.0)

    with pytest.raises(TimeoutError, match=r"0\.2 seconds"), processor_time(0.2):
        run()

    assert [type(one.exc_value) for one in swallowed] == [TimeoutError]
    assert gc.isenabled()
