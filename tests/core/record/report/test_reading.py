"""What a run has left is read as it grows, and whatever state it is in."""

from __future__ import annotations

import json
import math
import os
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anytron.base.errors import ConfigError, LostDirectoryError
from anytron.base.files import Lock
from anytron.record.report.history import History, Series, Tail
from anytron.record.report.run import Run, State, runs_in
from anytron.record.report.samples import choose_samples
from tests.core.record.report.runs import make_run, metrics, record, sample, write_lines

# ---- lines ----------------------------------------------------------------------------------------------


def values(tail):
    return list(tail.read())


def test_a_line_is_read_when_it_is_whole(tmp_path):
    tail = Tail(tmp_path / "x.jsonl")
    assert values(tail) == []
    (tmp_path / "x.jsonl").write_text('{"step": 1}\n{"st')
    assert values(tail) == [None, {"step": 1}]
    assert tail.cut_short
    with (tmp_path / "x.jsonl").open("a") as file:
        file.write('ep": 2}\n')
    assert values(tail) == [{"step": 2}]
    assert values(tail) == []
    assert not tail.cut_short


def test_a_file_that_was_replaced_or_cut_back_is_read_from_its_beginning(tmp_path):
    path, new = tmp_path / "x.jsonl", tmp_path / "new"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    tail = Tail(path)
    values(tail)
    new.write_text('{"step": 1}\n{"step": 22}\n{"step": 3}\n')
    new.replace(path)
    assert values(tail) == [None, {"step": 1}, {"step": 22}, {"step": 3}]
    path.write_text('{"step": 4}\n')
    assert values(tail) == [None, {"step": 4}]


@pytest.mark.parametrize("last", ["22", "2222"])
def test_a_file_that_was_cut_back_in_place_and_has_grown_since_is_read_from_its_beginning(tmp_path, last):
    path = tmp_path / "x.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    tail = Tail(path)
    values(tail)
    with path.open("r+") as file:
        file.truncate(12)
        file.seek(12)
        file.write(f'{{"step": {last}}}\n{{"step": 23}}\n')
    assert values(tail) == [None, {"step": 1}, {"step": int(last)}, {"step": 23}]
    assert values(tail) == []


def test_lines_that_are_no_records_are_counted(tmp_path):
    deep = "[" * 100_000
    text = f'{{"step": 1}}\nno json\n[1]\n{deep}\n\n{{"step": {"9" * 5000}}}\n\xff\n{{"step": 2}}\n'
    (tmp_path / "x.jsonl").write_bytes(text.encode("latin-1"))
    tail = Tail(tmp_path / "x.jsonl")
    assert values(tail) == [None, {"step": 1}, {"step": 2}]
    assert tail.broken == 5


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x.jsonl")
    assert values(Tail(tmp_path / "x.jsonl")) == []


# ---- metrics --------------------------------------------------------------------------------------------


def test_what_is_repeated_takes_the_place_of_what_was_there():
    history = History()
    for step, reward in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.5), (3, 0.6)):
        assert history.add({"step": step, "r": reward})
    assert list(history.steps) == [1, 2, 3]
    assert list(history.series["r"].values) == [0.1, 0.5, 0.6]
    assert history.at(2) == {"r": 0.5}


def test_a_metric_may_be_missing_or_no_number():
    history = History()
    records = [{"step": 1, "a": 1, "b": "x"}, {"a": 5}, {"step": True}, {"step": -1}, {"step": 2.5}]
    records += [{"step": 2, "b": True, "c": None}, {"step": 3.0, "a": 10**400, "c": [1]}]
    assert [history.add(one) for one in records] == [True, False, False, False, False, True, True]
    assert history.series.keys() == {"a"}
    assert list(history.series["a"].steps) == [1, 3]
    assert list(history.series["a"].values) == [1.0, math.inf]
    assert history.values("a") == [1.0]
    assert history.at(2) == {}


@given(st.lists(st.floats(allow_subnormal=False), min_size=1, max_size=300), st.integers(4, 60))
def test_a_thinned_line_is_short_and_keeps_extremes_ends_and_the_first_that_is_not_finite(numbers, points):
    series = Series()
    for step, number in enumerate(numbers):
        series.add(3 * step, number)
    thin = series.thinned(points)
    assert len(thin.steps) <= max(points, 5)
    assert list(thin.steps) == sorted(set(thin.steps))
    assert {0, 3 * (len(numbers) - 1)} <= set(thin.steps)
    kept, finite = list(thin.values), [number for number in numbers if math.isfinite(number)]
    if finite:
        assert {min(finite), max(finite)} <= set(kept)
    odd = [step for step, number in enumerate(numbers) if not math.isfinite(number)]
    if odd:
        assert 3 * odd[0] in thin.steps


NUMBERS = st.floats() | st.integers(-99, 99).map(float)


@given(
    st.lists(NUMBERS, max_size=12) | st.lists(NUMBERS, min_size=30, max_size=200), st.integers(4, 20), st.integers(1, 5)
)
def test_of_each_section_a_thinned_line_keeps_the_lowest_and_the_highest_in_their_order(numbers, points, every):
    """The law of a thinned line: no peak is lost, however it is drawn."""
    series = Series()
    for place, number in enumerate(numbers):
        series.add(every * place, number)
    thin = series.thinned(points)
    kept = dict(zip(thin.steps, thin.values, strict=True))
    assert list(kept) == sorted(kept), "in their order, each once"
    assert all(repr(value) == repr(numbers[step // every]) for step, value in kept.items())
    if len(numbers) <= points:
        assert (len(thin.steps), series.section(points)) == (len(numbers), 1), "a short one is as it is"
        return
    parts = max((points - 2) // 3, 1)
    assert series.section(points) == every * (-(-len(numbers) // parts) - 1) + 1
    assert list(kept)[-1] == every * (len(numbers) - 1)
    for part in range(parts):
        section = range(part * len(numbers) // parts, (part + 1) * len(numbers) // parts)
        finite = [numbers[place] for place in section if math.isfinite(numbers[place])]
        drawn = [kept[every * place] for place in section if every * place in kept]
        if finite:
            assert {min(finite), max(finite)} <= set(drawn)
        assert sum(map(math.isfinite, drawn)) <= 2 + (part == 0) + (part == parts - 1), "and both ends"
        assert any(not math.isfinite(value) for value in drawn) == (len(finite) < len(section))


# ---- a run ----------------------------------------------------------------------------------------------


def test_how_a_run_ended(tmp_path):
    finished = make_run(tmp_path / "finished")
    assert Run(finished).state is State.FINISHED
    assert Run(finished).is_over
    stopped = make_run(tmp_path / "stopped", 12, run=record())
    assert Run(stopped).state is State.STOPPED
    failed = make_run(tmp_path / "failed", 12, run=record(failure="It broke."))
    assert (Run(failed).state, Run(failed).failure) == (State.FAILED, "It broke.")


@pytest.mark.parametrize("again", [False, True], ids=["removed", "replaced"])
def test_a_run_whose_directory_is_gone_is_not_one_that_stopped(tmp_path, again):
    link = tmp_path / "latest"
    link.symlink_to(make_run(tmp_path / "run", 12, run=record()))
    run = Run(link)
    run.update()
    shutil.rmtree(tmp_path / "run")
    if again:
        make_run(tmp_path / "run", 12, run=record())
    with pytest.raises(LostDirectoryError, match=r"latest\.rescued-"):
        run.update()


def test_a_run_goes_on_as_long_as_its_process_has_the_lock(tmp_path):
    path = make_run(tmp_path / "run", 12, run=record(failure="Of the process before."))
    lock = Lock(path / ".lock")
    run = Run(path)
    assert (run.state, run.failure, run.is_over) == (State.GOING, None, False)
    assert run.owner.startswith(f"process {os.getpid()} on ")
    assert run.remaining_seconds == pytest.approx(18 * 4.5)
    lock.release()
    run.update()
    assert run.state is State.FAILED
    assert not run.is_over, "the process that wrote here still lives, and may start again after a loss"
    (path / ".lock").write_text((path / ".lock").read_text().replace(str(os.getpid()), "999999999"))
    assert Run(path).is_over


def test_what_cannot_be_known_is_not_guessed(tmp_path):
    path = make_run(tmp_path / "run", 12, run=record())
    (path / ".lock").symlink_to(tmp_path / "elsewhere")
    run = Run(path)
    assert (run.state, run.is_over) == (State.UNKNOWN, False)
    assert len(run.problems) == 1


def test_steps_that_come_are_read(tmp_path):
    path = make_run(tmp_path / "run", 3, run=record())
    run = Run(path)
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics(4)) + '\n{"step": 5, "rew')
    run.update()
    assert list(run.history.steps) == [1, 2, 3, 4]
    assert run.problems == ["metrics.jsonl ends in the middle of a line, which is left out"]


def test_where_the_time_goes(tmp_path):
    run = Run(make_run(tmp_path / "run", 10))
    assert run.seconds_by_part() == pytest.approx({"rollout": 30.0, "update": 10.0, "other": 5.0})
    assert run.seconds_by_part(2) == pytest.approx({"rollout": 6.0, "update": 2.0, "other": 1.0})


@pytest.mark.parametrize("name", ["run.json", "patches.json", "metrics.jsonl", "samples.jsonl", "losses.jsonl"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe{", b"[1, 2]\n", b'{"config": 3, "trainer": 5}\n', b"[" * 100_000])
def test_a_damaged_file_is_a_problem_that_is_told(tmp_path, name, content):
    path = make_run(tmp_path / "run")
    (path / name).write_bytes(content)
    run = Run(path)
    read = (choose_samples(run, 9999), run.losses(), run.workers(), run.log(), run.state, run.remaining_seconds)
    assert len(read) == 6
    if content:
        told = name in " ".join(run.problems)
        assert told or (name, content[:2]) == ("losses.jsonl", b'{"'), run.problems


def test_the_last_lines_of_the_log(tmp_path):
    path = make_run(tmp_path / "run")
    assert Run(path).log() == []
    (path / "logs" / "driver.log").write_bytes(b"one\n\ntw\xffo\nthree\nfo")
    assert Run(path).log() == ["one", "", "tw\ufffdo", "three"]
    assert Run(path).log(2) == ["tw\ufffdo", "three"]


@pytest.mark.parametrize("there", [False, True])
def test_another_directory_is_refused(tmp_path, there):
    if there:
        write_lines(tmp_path / "samples.jsonl", [sample(1)])
    with pytest.raises(ConfigError, match="not the directory of a run"):
        Run(tmp_path if there else tmp_path / "nothing")


# ---- stages ---------------------------------------------------------------------------------------------


def test_a_directory_of_stages_stands_for_their_runs_in_their_order(tmp_path):
    for name in ("10-last", "2-second", "1-first", "3-not-begun", "logs"):
        (tmp_path / name).mkdir()
    for name in ("10-last", "2-second", "1-first", "logs"):
        write_lines(tmp_path / name / "metrics.jsonl", [metrics(1)])
    assert [run.name for run in runs_in(tmp_path)] == ["1-first", "2-second", "10-last"]
    assert runs_in(tmp_path / "2-second") == [tmp_path / "2-second"]


def test_a_directory_without_runs_is_given_back_to_be_refused(tmp_path):
    assert runs_in(tmp_path) == [tmp_path]
    assert runs_in(tmp_path / "nowhere") == [tmp_path / "nowhere"]
    with pytest.raises(ConfigError, match="not the directory of a run"):
        Run(runs_in(tmp_path)[-1])
