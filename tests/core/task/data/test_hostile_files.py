"""Hostile data files: each is refused in words, or read; none hangs, takes the memory, or commands the terminal.

What runs here is all that ``anytron train`` and ``anytron data check`` do with data before an engine is built.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import anytron.run.preflight.prepare as prepare_module
from anytron.base.errors import AnytronError
from anytron.cli.main import print_error
from anytron.config.diagnostics import refuse
from anytron.run.preflight.open_run import open_run
from anytron.task.data import arrow, reading
from anytron.task.isolation import reader
from tests.core.task.data import thrift
from tests.core.task.data.hostile_pictures import PICTURES
from tests.core.task.data.hostile_tables import ARROW, PARQUET, arrow_bytes, list_bomb, parquet_bytes
from tests.core.task.data.hostile_tables import SOUND as ROWS
from tests.core.task.data.hostile_texts import CSV, JSONL, ROW

EXAMPLES = Path(__file__).parents[4] / "examples"
EXAMPLE = {"text": "grpo_sort", "pictures": "grpo_count_shapes"}
SECONDS = 10
"""Of processor time, driver and reader together: this machine may have others to serve."""
MEMORY = 1 << 30
SOURCES = {"jsonl": JSONL, "csv": CSV, "parquet": PARQUET, "dataset": ARROW, "pictures": PICTURES}
HEAVY = (
    "jsonl: ten million lists",
    "jsonl: a prompt of 20 MB",
    "parquet: 60 rows of 50 MB in 2 kB, read as texts",
    "parquet: one row of 200 MB",
    "parquet: 100,000 columns",
    "pictures: 8,192 x 8,192 of one colour",
)
"""Take seconds of processor time, here or in the making."""
CASES = {
    name: pytest.param(source, *case, marks=pytest.mark.slow if name in HEAVY else (), id=name)
    for source, cases in SOURCES.items()
    for case_name, case in cases.items()
    for name in (f"{source}: {case_name}",)
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The configurations of a language model's run, and of one that takes pictures; rewards are registered ones."""
    folder = tmp_path_factory.mktemp("runs")
    return {kind: opened(folder / f"{kind}.yaml", example) for kind, example in EXAMPLE.items()}


def written(path, example, **data):
    """Write the configuration of an example with other data."""
    config = yaml.safe_load((EXAMPLES / f"{example}.yaml").read_text())
    model = config["model"]
    model |= {key: f"{EXAMPLES}/{model[key]}" for key in ("tokenizer", "processor") if key in model}
    config["rewards"] = [{"function": "exact_match"}]
    config["data"] |= data
    config["trainer"]["output_dir"] = str(path.with_suffix(""))
    path.write_text(yaml.safe_dump(config))
    return path


def opened(path, example):
    run = open_run(written(path, example, source="jsonl", options={"path": "rows.jsonl"}), [])
    refuse(run.diagnostics)
    return run.config


def obeyed(text):
    """Find what a terminal would obey."""
    return {one for one in text if one != "\n" and not one.isprintable()}


class Used:
    """What a piece of work takes, and the processes that it waits for.

    Attributes:
        seconds: Of processor time.
        memory: Bytes that the largest of them took beyond what this process had mapped. Of that a reader may take
            what is free, as pyarrow keeps it after other tests.
    """

    def __init__(self):
        self.seconds, self.memory = 0.0, 0


def resident(field="VmRSS"):
    return int(re.search(rf"{field}:\s*(\d+)", Path("/proc/self/status").read_text())[1]) << 10


@contextmanager
def used(monkeypatch):
    """Measure what is done inside."""
    found, before = Used(), max(resident(), resident("VmData"))

    def waitpid(pid, options):
        pid, status, taken = os.wait4(pid, options)
        if pid:
            found.seconds += taken.ru_utime + taken.ru_stime
            found.memory = max(found.memory, (taken.ru_maxrss << 10) - before)
        return pid, status

    monkeypatch.setattr(os, "waitpid", waitpid)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    begin = time.process_time()
    yield found
    found.seconds += time.process_time() - begin
    found.memory = max(found.memory, resident("VmHWM") - before)


@pytest.fixture(autouse=True)
def sound_models(monkeypatch):
    """Their directories are read anew in the tests of the command line; here it would take most of the time."""
    monkeypatch.setattr(prepare_module, "examined", lambda *_: nullcontext({}))


def start(runs, source, options):
    """All that a run does with data before its first worker; the error, or None. It raises anything but ours."""
    run = runs["pictures" if source == "pictures" else "text"]
    kind = Path(options["path"]).suffix.removeprefix(".") if source == "pictures" else source
    try:
        data = run.data.model_copy(update={"source": kind, "options": options, "deduplicate": True})
        prepare_module.prepare(run.model_copy(update={"data": data}))
    except AnytronError as error:
        return error


@pytest.mark.some(20)
@pytest.mark.parametrize(("source", "make", "says"), CASES.values())
def test_a_hostile_file_is_refused_in_words_or_read(runs, tmp_path, monkeypatch, capfd, source, make, says):
    """``says``: part of the error; None = it is read; empty = either."""
    (tmp_path / "data").mkdir()
    options = make(tmp_path / "data")
    capfd.readouterr()
    with used(monkeypatch) as found:
        error = start(runs, source, options)
    if error is not None:
        print_error(error)
    shown = "".join(capfd.readouterr())
    assert found.seconds < SECONDS
    assert found.memory < MEMORY
    if error is None:
        assert not says
        return
    assert says is not None, error
    assert re.search(f"(?s){says}", str(error)), error
    assert all((error.what, error.where, error.fix)), error
    assert obeyed(shown) == set()


@pytest.mark.slow
def test_without_its_limits_a_bomb_takes_the_memory(runs, tmp_path, monkeypatch):
    """The twin of the test above: what it measures is there, and the limits are what keeps it small."""
    make = list_bomb(15_000, 100_000, plain=True, prompt=[None])
    options = make(tmp_path)
    monkeypatch.setattr(arrow, "LARGEST_ROW", 1 << 40)
    monkeypatch.setattr(arrow, "FREE", 1 << 40)
    monkeypatch.setattr(reader, "_limit", lambda memory: None)
    monkeypatch.setattr(reading, "ConfinedReader", partial(reader.ConfinedReader, compute_s=300.0))
    with used(monkeypatch) as found:
        error = start(runs, "parquet", options)
    assert "neither a string nor a list" in str(error)
    assert found.memory > MEMORY


MEASURED = """
import json, os, pathlib, subprocess, sys
file, *program = sys.argv[1:]
_, status, taken = os.wait4(subprocess.Popen(program).pid, 0)
used = taken.ru_maxrss << 10, taken.ru_utime + taken.ru_stime
pathlib.Path(file).write_text(json.dumps([os.waitstatus_to_exitcode(status), *used]))
"""
"""Runs a program and writes its exit status, peak of memory in bytes, and seconds of processor time. A program's peak
begins with that of the process that starts it, and the process of the tests is large."""


def check(folder, source, options):
    """Run ``anytron data check`` as a user does; give its exit status, output, bytes of memory, and processor time."""
    path = written(folder / "run.yaml", "grpo_sort", source=source, options=options)
    program = [sys.executable, "-c", "from anytron.cli.main import run; run()", "data", "check", str(path)]
    measured = [sys.executable, "-c", MEASURED, str(folder / "used.json"), *program]
    done = subprocess.run(measured, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True)
    status, memory, seconds = json.loads((folder / "used.json").read_text())
    return status, done.stdout.decode(), memory, seconds


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("parquet", "a list of one value, 100,000 times, read as texts"),
        pytest.param("jsonl", "a name with a NUL", marks=pytest.mark.slow),
        pytest.param("dataset", "data that are a pipe", marks=pytest.mark.slow),
        pytest.param("jsonl", "ten million lists", marks=pytest.mark.slow),
        pytest.param("parquet", "60 rows of 50 MB in 2 kB, read as texts", marks=pytest.mark.slow),
        pytest.param("parquet", "a name with escape sequences", marks=pytest.mark.slow),
    ],
)
def test_the_command_line_says_so_in_four_lines(tmp_path, source, name):
    make, _ = SOURCES[source][name]
    status, shown, memory, seconds = check(tmp_path, source, make(tmp_path))
    assert status == 1
    lines = shown.splitlines()
    assert [line.split(":")[0].strip() for line in lines[-4:]] == ["error", "where", "why", "fix"], shown
    assert "Traceback" not in shown
    assert obeyed(shown) == set()
    assert memory < MEMORY + (700 << 20), "the driver has libraries in memory as well"
    assert seconds < 2 * SECONDS, "most of them to import libraries"


SOUND = {
    "jsonl": lambda: ROW * 20,
    "csv": lambda: b"prompt,answer\n" + b'21>,"12"\n' * 20,
    "parquet": lambda: parquet_bytes({name: values * 9 for name, values in ROWS.items()}, compression="zstd"),
    "dataset": lambda: arrow_bytes({name: values * 9 for name, values in ROWS.items()}),
}


def refused_or_read(runs, folder, source, content):
    path = folder / f"rows.{'arrow' if source == 'dataset' else source}"
    path.write_bytes(content)
    error = start(runs, source, {"path": str(path)})
    if error is not None:
        assert all((error.what, error.where, error.fix)), error


def mutated(runs, folder, source):
    """Try a sound file with a few bytes that are others, that are cut out, or put in again."""
    sound = SOUND[source]()
    places = st.integers(0, len(sound) - 1)
    edits = st.lists(
        st.tuples(places, st.sampled_from("=-+"), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4
    )

    @given(edits)
    def attempt(edits):
        content = sound
        for place, kind, new in edits:
            begin = place % max(len(content), 1)
            content = content[:begin] + (b"" if kind == "-" else new) + content[begin + len(new) * (kind != "+") :]
        refused_or_read(runs, folder, source, content)

    return attempt


FEW = settings(max_examples=5, suppress_health_check=list(HealthCheck))
MANY = settings(max_examples=400, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("effort", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"])
@pytest.mark.parametrize("source", SOUND)
def test_random_damage_is_refused_in_words_or_read(runs, tmp_path, source, effort):
    effort(mutated(runs, tmp_path, source))()


def lies():
    """Each number of a footer, and what it becomes."""
    fields, before = thrift.footer_of(SOUND["parquet"]())
    for path in thrift.numbers(fields):
        for value in (-1, 0, 1 << 31, 1 << 62, -(1 << 63)):
            yield fields, before, path, value


@pytest.mark.parametrize("step", [45, pytest.param(1, marks=pytest.mark.slow)])
def test_each_number_of_a_footer_may_lie(runs, tmp_path, step):
    for fields, before, path, value in itertools.islice(lies(), 0, None, step):
        true = thrift.at(fields, path)
        thrift.put(fields, path, value)
        refused_or_read(runs, tmp_path, "parquet", thrift.with_footer(fields, before))
        thrift.put(fields, path, true)
