"""Signals that end runs: the state is saved, and the run can be resumed."""

from __future__ import annotations

import os
import signal
import time

import pytest

from anytron.base.errors import ProcessLost, WorkerError
from tests.core.run.trainer.disturbed_runs import EVERY_STEP, assert_equal, lines, output, raise_at, steps


def send_in(run, role, method, call, *numbers):
    """Send this process signals in the n-th call of a method of an engine."""
    start, calls = run.executor.start, []

    def started(spec):
        group = start(spec)
        for kind in ("submit", "submit_each"):
            original = getattr(group, kind)

            def wrapped(called, *arguments, original=original, **options):
                if spec.role == role and called == method:
                    calls.append(called)
                    if len(calls) == call:
                        for number in numbers:
                            os.kill(os.getpid(), number)
                            time.sleep(0.01)
                return original(called, *arguments, **options)

            setattr(group, kind, wrapped)
        return group

    run.executor.start = started


@pytest.mark.some(3)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
@pytest.mark.parametrize(
    ("role", "method", "done"),
    [("rollout", "poll", 1), ("trainer", "export_weights", 1), ("trainer", "update", 2)],
    ids=["rollout", "sync", "update"],
)
def test_a_signal_saves_and_ends_the_run_which_can_be_resumed(new_run, undisturbed, role, method, done, number):
    trainer = {"total_steps": 3, "output_dir": str(output(new_run))}
    run = new_run(trainer=trainer)
    handlers = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)]
    send_in(run, role, method, 2, number)
    summary = run.train()
    # Generation is given up; a step whose updates have begun is finished.
    assert (summary.steps, summary.stopped_by) == (done, number.name)
    assert steps(output(new_run)) == [done]
    assert len(lines(output(new_run) / "metrics.jsonl")) == done
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)] == handlers
    if number is signal.SIGTERM:
        new_run(trainer=trainer, resume="auto").train()
        assert_equal(output(new_run), undisturbed(3))


def test_a_signal_at_a_step_that_is_saved_writes_nothing_more(new_run):
    run = new_run(trainer={"total_steps": 3, "output_dir": str(output(new_run))}, checkpoint=EVERY_STEP)
    calls = raise_at(run, 9)
    send_in(run, "rollout", "poll", 3, signal.SIGTERM)
    run.train()
    assert calls.count("save_checkpoint") == 2
    assert steps(output(new_run)) == [1, 2]


def test_a_signal_while_the_model_is_saved_leaves_that_to_the_next_start(new_run, undisturbed):
    run = new_run()
    send_in(run, "trainer", "save_hf", 1, signal.SIGTERM)
    assert run.train().stopped_by == "SIGTERM"
    assert not (output(new_run) / "hf").exists()
    new_run(resume="auto").train()
    assert_equal(output(new_run), undisturbed(2))


@pytest.mark.parametrize("lost_in", ["update", "save_checkpoint"])
def test_a_process_that_is_lost_after_a_signal_is_not_replaced(new_run, lost_in):
    run = new_run(trainer={"total_steps": 3, "output_dir": str(output(new_run))})
    calls = raise_at(run, 2 if lost_in == "update" else 1, ProcessLost("Rank 0 is gone."), method=lost_in)
    send_in(run, "trainer", "update", 2, signal.SIGTERM)
    with pytest.raises(WorkerError, match=r"(?s)Rank 0 is gone.*SIGTERM had asked.*resume=auto") as raised:
        run.train()
    assert not isinstance(raised.value, ProcessLost)
    assert calls.count("update") == 2


def test_a_second_signal_ends_the_process_at_once(new_run):
    run = new_run(trainer={"total_steps": 3, "output_dir": str(output(new_run))})
    send_in(run, "trainer", "update", 2, signal.SIGTERM, signal.SIGTERM)
    with pytest.raises(SystemExit) as raised:
        run.train()
    assert raised.value.code == 143
    assert steps(output(new_run)) == []


def test_signals_are_left_alone_if_so_wished(new_run):
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
    try:
        run = new_run(checkpoint={"on_signal": False})
        send_in(run, "rollout", "poll", 1, signal.SIGUSR1)
        assert run.train().stopped_by is None
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [1]


def test_an_ignored_hangup_stays_ignored(new_run):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run = new_run()
        send_in(run, "rollout", "poll", 1, signal.SIGHUP)
        assert run.train().steps == 2
    finally:
        signal.signal(signal.SIGHUP, before)
