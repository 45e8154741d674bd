"""Hostile data files: each is refused in words, or read; none hangs, takes the memory, or commands the terminal.

What runs here is all that ``anytron train`` and ``anytron data check`` do with data before a worker starts.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
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
from anytron.preflight.open_run import open_run
from anytron.preflight.prepare import prepare

EXAMPLES = Path(__file__).parents[3] / "examples"
SECONDS = 10
"""Of processor time, driver and reader together: this machine may have others to serve."""
MEMORY = 1 << 30
SOURCES = {"jsonl": JSONL, "csv": CSV, "parquet": PARQUET, "dataset": ARROW, "pictures": PICTURES}
CASES = {f"{source}: {name}": (source, *case) for source, cases in SOURCES.items() for name, case in cases.items()}


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """A run of a language model, and one that takes pictures; rewards are registered ones."""
    made = {}
    for kind, example in (("text", "grpo_sort"), ("pictures", "grpo_count_shapes")):
        config = yaml.safe_load((EXAMPLES / f"{example}.yaml").read_text())
        config["model"] |= {
            key: f"{EXAMPLES}/{config['model'][key]}" for key in ("tokenizer", "processor") if key in config["model"]
        }
        config["rewards"] = [{"function": "exact_match"}]
        made[kind] = tmp_path_factory.mktemp(kind) / "run.yaml"
        made[kind].write_text(yaml.safe_dump(config))
    return made


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


def start(configs, source, options, folder):
    """All that a run does before its first worker; the error, or None: anything else than one of ours is raised."""
    path = configs["pictures" if source == "pictures" else "text"]
    kind = {"pictures": Path(options["path"]).suffix.removeprefix(".")}.get(source, source)
    overrides = [f"data.source={kind}", f"trainer.output_dir={folder / 'run'}", "data.deduplicate=true"]
    overrides.append(f"data.options={json.dumps(options)}")
    try:
        run = open_run(path, overrides)
        refuse(run.diagnostics)
        prepare(run.config)
    except AnytronError as error:
        return error


@pytest.mark.parametrize(("source", "make", "says"), CASES.values(), ids=CASES)
def test_a_hostile_file_is_refused_in_words_or_read(configs, tmp_path, monkeypatch, capfd, source, make, says):
    """``says``: part of the error; None = it is read; empty = either."""
    (tmp_path / "data").mkdir()
    options = make(tmp_path / "data")
    capfd.readouterr()
    with used(monkeypatch) as found:
        error = start(configs, source, options, tmp_path)
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
    assert error.what and error.where and error.fix, error
    assert {one for one in shown if one != "\n" and not one.isprintable()} == set()
