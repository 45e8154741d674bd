"""Calls that nobody waits for at once: several groups work at the same time, and each fails for itself."""

import signal
import time

import pytest

from anytron.base.errors import ProcessLost, WorkerError
from anytron.workers.executor.protocol import GroupSpec
from tests.core.workers.executor.processes import wait_until_gone


def start_two(executor):
    return [executor.start(GroupSpec("trainer", "anytron.training_engines", "small", ranks, 1)) for ranks in (1, 2)]


def pids_of(group):
    return [facts["pid"] for facts in group.call("describe")]


def test_the_first_of_several_calls_to_be_done_is_given_and_each_fails_for_itself(make_executor):
    executor = make_executor()
    one, two = start_two(executor)
    assert [len(pids_of(group)) for group in (one, two)] == [1, 2]
    began = time.monotonic()

    slow, fast = one.submit("work", 1.5), two.submit("work", 0.5)

    assert time.monotonic() - began < 0.4
    assert executor.wait([slow, fast], timeout_s=0.0) == []
    assert executor.wait([slow, fast]) == [fast]
    assert fast.result() == [0, 1]
    assert not slow.done
    with pytest.raises(RuntimeError, match=r"echo\(\) was called on engine 'small' while an earlier call"):
        one.submit("echo")
    assert slow.result() == slow.result() == [0]
    assert time.monotonic() - began < 1.9, "they worked at the same time"

    healthy, lost = one.submit("work", 1.0), two.submit("kill", 1)
    assert executor.wait([healthy, lost]) == [lost]
    for _ in range(2):
        with pytest.raises(ProcessLost, match=r"rank 1 .* killed by SIGKILL"):
            lost.result()
    assert (one.ended, two.ended) == (False, True)
    with pytest.raises(WorkerError, match=r"echo\(\) .* cannot be called: its processes have ended"):
        two.submit("echo")
    assert healthy.result() == [0]


def test_a_call_waits_until_the_engine_is_built_and_one_under_way_does_not_delay_the_end(make_executor, tmp_path):
    executor = make_executor(engine_options={"closed": str(tmp_path / "closed")})
    group, message = executor.start(GroupSpec("trainer", "anytron.training_engines", "small", 1, 1)), b"x" * 2_000_000
    began = time.monotonic()

    early = group.submit("echo", message)

    assert time.monotonic() - began < 0.5, "a process that is starting reads nothing"
    assert not early.done
    assert early.result() == [(0, (message,), {})]

    pids, under_way = pids_of(group), group.submit("work", 60.0)
    group.close()
    assert time.monotonic() - began < 30
    assert wait_until_gone(pids)
    assert not (tmp_path / "closed.0").exists(), "its engine is in the middle of something"
    assert under_way.done
    with pytest.raises(WorkerError, match=r"work\(\) .* cannot be called: its processes have ended"):
        under_way.result()


def test_a_wait_that_is_interrupted_ends_those_that_were_waited_for(make_executor):
    executor = make_executor()
    one, two = start_two(executor)
    pids = pids_of(one)
    pids_of(two)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            executor.wait([one.submit("work", 60.0)])
    finally:
        signal.signal(signal.SIGALRM, before)

    assert wait_until_gone(pids)
    assert one.ended
    assert two.call("work", 0.0) == [0, 1]
