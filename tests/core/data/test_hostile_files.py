"""Hostile data files: each is refused in words, or read; none hangs, takes the memory, or commands the terminal.

What runs here is all that ``anytron train`` and ``anytron data check`` do with data before a worker starts.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from tests.core.data.hostile_pictures import PICTURES
from tests.core.data.hostile_tables import ARROW, PARQUET
from tests.core.data.hostile_texts import CSV, JSONL

from anytron.cli.main import print_error
from anytron.config.diagnostics import refuse
from anytron.errors import AnytronError
import anytron.preflight.prepare as prepare_module
from anytron.preflight.open_run import open_run

EXAMPLES = Path(__file__).parents[3] / "examples"
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


class Used:
    """What a piece of work takes, and the processes that it waits for.

    Attributes:
        seconds: Of processor time.
        memory: Bytes that the largest of them took beyond what this process had.
    """

    def __init__(self):
        self.seconds, self.memory = 0.0, 0


def resident(field="VmRSS"):
    return int(re.search(rf"{field}:\s*(\d+)", Path("/proc/self/status").read_text())[1]) << 10


@contextmanager
def used(monkeypatch):
    """Measure what is done inside."""
    found, before = Used(), resident()

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
    monkeypatch.setattr(prepare_module, "examine", lambda *_: None)


def start(runs, source, options):
    """All that a run does with data before its first worker; the error, or None. It raises anything but ours."""
    run = runs["pictures" if source == "pictures" else "text"]
    kind = Path(options["path"]).suffix.removeprefix(".") if source == "pictures" else source
    try:
        data = run.data.model_copy(update={"source": kind, "options": options, "deduplicate": True})
        prepare_module.prepare(run.model_copy(update={"data": data}))
    except AnytronError as error:
        return error


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
    if os.environ.get("FUZZ_SHOW"):
        with capfd.disabled():
            print(f"{found.seconds:5.1f} s {found.memory >> 20:5} MiB  {source}: {str(error)[:600]!r}")
    assert found.seconds < SECONDS
    assert found.memory < MEMORY
    if error is None:
        assert not says
        return
    assert says is not None, error
    assert re.search(f"(?s){says}", str(error)), error
    assert all((error.what, error.where, error.fix)), error
    assert {one for one in shown if one != "\n" and not one.isprintable()} == set()
