"""Ranks that wait for ever in a collective are found within the time limit, and no slow rank is taken for one."""

import dataclasses
import os
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anytron.base.errors import ProcessLost
from anytron.workers.executor.heartbeat import (
    FRESH_S,
    Collective,
    Heartbeat,
    Standing,
    StandingReporter,
    shared_memory,
    summary,
)
from anytron.workers.executor.stall import StallWatch, held_ranks
from tests.core.workers.executor.processes import wait_until_gone

LEFT_EARLY = (
    [("all_reduce",)],
    [("all_reduce",), ("all_reduce",)],
)
DIFFERENT = (
    [("all_reduce",), ("all_reduce",)],
    [("all_reduce",), ("broadcast",)],
)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("plans", "held", "missing"),
    [
        pytest.param(LEFT_EARLY, "Trainer rank 1", "trainer rank 0", id="one rank leaves early"),
        pytest.param(DIFFERENT, "Trainer rank 0, trainer rank 1", "trainer rank 0, trainer rank 1", id="two calls"),
    ],
)
def test_ranks_that_wait_for_ever_are_named_with_their_collective_and_stacks(start, plans, held, missing):
    group = start(ranks=2, stall_timeout_s=1.0)
    pids = [facts["pid"] for facts in group.call("describe")]
    began = time.monotonic()

    with pytest.raises(ProcessLost) as caught:
        group.call("follow", plans)

    assert time.monotonic() - began < 60
    assert caught.value.what == (
        f"{held} would wait for ever in follow(), in a collective that {missing} never joined."
    )
    assert "in all_reduce (gloo) with inputs [3], collective 3 of group 0 (default_pg; ranks 0, 1)" in caught.value.why
    assert "testchip_engine.py" in caught.value.why
    assert "in follow" in caught.value.why
    if missing == "trainer rank 0":
        assert "without trainer rank 0 (which has begun 2 collectives of this group)" in caught.value.why
        assert "trainer rank 0 has answered follow() and begins no more collectives" in caught.value.why
    assert "executor.stall_timeout_s" in caught.value.fix
    assert "trainer-1.log" in caught.value.where
    assert wait_until_gone(pids)


@pytest.mark.slow
def test_slow_ranks_are_waited_for_whatever_they_do(start):
    """Three take four times the limit: in Python, in a library, asleep; the fourth waits for them in all_reduce."""
    last = [("all_reduce",)]
    plans = [[(work, 4.0), *last] for work in ("python", "library", "sleep")]

    assert start(ranks=4, stall_timeout_s=1.0).call("follow", [*plans, last]) == [0, 1, 2, 3]


def standing(begun, *waits, groups=None, complete=True, place=0):
    groups = groups or {"g": [0, 1], "h": [0, 1]}
    return Standing(0.0, 0, place, [], groups, {}, begun, complete, list(waits))


def one(number, group="g", call="all_reduce"):
    return Collective("gloo", group, number, call, "[3]")


WAITS = standing({"gloo g": 3}, one(3))
BEHIND = standing({"gloo g": 2})


@pytest.mark.parametrize(
    ("standings", "answered", "held"),
    [
        pytest.param([BEHIND, WAITS], {0}, {1}, id="it has answered without joining"),
        pytest.param([BEHIND, WAITS], set(), set(), id="it may still join"),
        pytest.param([None, WAITS], set(), set(), id="it moves"),
        pytest.param([None, WAITS], {0}, set(), id="nothing is known of it"),
        pytest.param([WAITS, WAITS], set(), set(), id="both have joined: data are on their way"),
        pytest.param([standing({"gloo g": 3}), WAITS], {0}, set(), id="it had joined before it answered"),
        pytest.param([standing({"gloo g": 4}), WAITS], {0}, set(), id="it is further"),
        pytest.param([standing({}), WAITS], {0}, {1}, id="it has begun none at all"),
        pytest.param([standing({}, complete=False), WAITS], {0}, set(), id="what it began is forgotten"),
        pytest.param([standing({}, groups={"g": [0, 2]}), WAITS], {0}, set(), id="another group of this name"),
        pytest.param([standing({"gloo g": 3}, one(3, call="broadcast")), WAITS], set(), {0, 1}, id="another call"),
        pytest.param(
            [
                standing({"gloo g": 2, "gloo h": 8}, one(8, "h")),
                standing({"gloo g": 3, "gloo h": 7}, one(3)),
            ],
            set(),
            {0, 1},
            id="groups in another order",
        ),
    ],
)
def test_only_what_is_certain_is_said(standings, answered, held):
    assert set(held_ranks(standings, answered)) == held


class Noted:
    """A rank whose notes are given."""

    def __init__(self, name, notes):
        self.name, self.notes = name, iter(notes)

    def standing(self):
        return next(self.notes)


def notes(standing, *moments, answers=0):
    return [dataclasses.replace(standing, moment=float(moment), answers=answers) for moment in moments]


@pytest.mark.parametrize(
    ("behind", "held"),
    [
        pytest.param(notes(BEHIND, 5, 6, 7, 8, answers=1), True, id="noted after its answer"),
        pytest.param(notes(BEHIND, 5, 6, 7, 8), False, id="noted before its answer"),
        pytest.param(notes(BEHIND, 5, 5, 5, 5, answers=1), False, id="noted once"),
        pytest.param(notes(BEHIND, 1, 2, 3) + notes(BEHIND, 8, answers=1), False, id="has just answered"),
        pytest.param([*notes(BEHIND, 6, 7), None, *notes(BEHIND, 8)], False, id="not heard of since"),
    ],
)
def test_a_rank_that_has_answered_counts_by_what_it_noted_afterwards(behind, held, monkeypatch):
    clock = iter(range(100, 200, 10))
    monkeypatch.setattr("anytron.workers.executor.stall.time.monotonic", lambda: float(next(clock)))
    watch = StallWatch([Noted("rank 0", behind), Noted("rank 1", notes(WAITS, 5, 6, 7, 8))], 2.0, answer=1)

    looks = [set(watch.look({0})) for _ in behind]

    assert looks == [set(), set(), {1} if held else set(), {1} if held else set()]


@st.composite
def programs(draw):
    """Ranks of a program whose groups begin their collectives in one order, each somewhere in it."""
    ranks = draw(st.integers(2, 5))
    members = st.sets(st.integers(0, ranks - 1), min_size=2).map(sorted)
    groups = draw(st.lists(members, min_size=1, max_size=4))
    program = draw(st.lists(st.integers(0, len(groups) - 1), max_size=12))
    blocking = draw(st.booleans())
    place = [0] * ranks
    begun = [[0] * len(groups) for _ in range(ranks)]
    waits = [[] for _ in range(ranks)]
    for number in draw(st.lists(st.integers(0, ranks - 1), max_size=60)):
        if blocking and _unfinished(waits[number], begun, groups):
            continue
        while place[number] < len(program) and number not in groups[program[place[number]]]:
            place[number] += 1
        if place[number] < len(program):
            group = program[place[number]]
            begun[number][group] += 1
            waits[number].append((group, begun[number][group]))
            place[number] += 1
    standings = [
        Standing(
            0.0,
            0,
            0,
            [],
            {str(group): ranks for group, ranks in enumerate(groups) if number in ranks},
            {},
            {f"gloo {group}": count for group, count in enumerate(begun[number]) if count},
            True,
            [one(count, str(group)) for group, count in _unfinished(waits[number], begun, groups)],
        )
        for number in range(ranks)
    ]
    done = {
        number
        for number in range(ranks)
        if not any(number in groups[group] for group in program[place[number] :]) and not standings[number].waits
    }
    return standings, done


def _unfinished(waits, begun, groups):
    return [(group, count) for group, count in waits if any(begun[one][group] < count for one in groups[group])]


@given(programs(), st.data())
def test_no_rank_of_a_program_with_one_order_is_held_wherever_its_ranks_are(program, data):
    """Whether collectives block or not, whoever has answered, and of whomever nothing is known."""
    standings, done = program
    unknown = data.draw(st.sets(st.integers(0, len(standings) - 1)))

    assert held_ranks(standings, done) == {}
    assert held_ranks([None if n in unknown else s for n, s in enumerate(standings)], done) == {}


def entry(record, number, **more):
    fields = {"record_id": record, "collective_seq_id": number, "profiling_name": "nccl:all_reduce", "is_p2p": False}
    return {
        **fields,
        "process_group": ["7", "TP"],
        "retired": True,
        "state": "completed",
        "input_sizes": [[2, 3]],
        **more,
    }


def test_a_recorder_is_reduced_to_what_was_begun_and_is_not_over():
    active = {"retired": False, "state": "started"}
    entries = [
        entry(5, 9, **active, thread_id="2"),  # of a thread that saves a checkpoint
        entry(4, 1, **active, is_p2p=True),
        entry(3, 2, **active),
        entry(2, 1, retired=False),  # done, and its watchdog has not looked yet
        entry(1, 500),  # of an engine before, whose groups had the same names
    ]

    begun, waits = summary([entries, []], beside={"2"})

    assert begun == {"nccl 7": 2}
    assert waits == [Collective("nccl", "7", 2, "all_reduce", "[2, 3]")]


def test_a_note_is_written_when_it_is_asked_for_and_read_while_it_is_true(monkeypatch):
    descriptor = shared_memory()
    worker, starter = Heartbeat(descriptor), Heartbeat(descriptor)
    os.close(descriptor)
    reporter = StandingReporter(worker)

    reporter.beat()
    assert starter.read() == b"", "nobody has asked"
    starter.ask()
    thread = threading.Thread(target=lambda: [reporter.beat() for _ in range(3)])
    thread.start()
    thread.join()
    told = Standing.decode(starter.read())
    assert any("in join" in frame or "in wait" in frame for frame in told.frames)
    assert not worker.asked

    worker.write(b"x" * (1 << 20))
    assert starter.read() == b"", "it would not fit"
    worker.write(b"whole")
    worker._memory[32] ^= 1
    assert starter.read() == b"", "it is being written"
    worker.write(b"whole")
    later = time.monotonic() + FRESH_S
    monkeypatch.setattr("anytron.workers.executor.heartbeat.time.monotonic", lambda: later)
    assert starter.read() == b"", "the worker has not been heard of since"
