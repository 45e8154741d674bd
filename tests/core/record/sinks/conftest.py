"""A run's directory with sinks, and what a person is told."""

from __future__ import annotations

import re
from contextlib import contextmanager

import pytest

from anytron.config.schema import RunConfig
from anytron.record.sinks.delivery import MetricSinks
from anytron.record.tracking.claim import ClaimedDirectory
from anytron.record.tracking.progress import Progress
from anytron.record.tracking.run_directory import RunDirectory


class Told(Progress):
    """Remembers what it is told."""

    def __init__(self):
        self.notes, self.warnings = [], []

    def note(self, text):
        self.notes.append(text)

    def warn(self, text):
        self.warnings.append(text)


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def with_sinks(tmp_path, told):
    """Open a run with sinks: names, or classes of a file ``sinks.py`` of this text."""

    @contextmanager
    def opened(*sinks, text="", after=None, timeout=300.0):
        (tmp_path / "sinks.py").write_text(f"from anytron.record.sinks import MetricSink\n{text}")
        config = configuration(tmp_path, [{"sink": one} if isinstance(one, str) else one for one in sinks], timeout)
        with ClaimedDirectory(config, print) as claimed:
            if after is None:
                run = RunDirectory.begin(claimed, config)
            else:
                run = RunDirectory.resume(claimed, config, after, [])
            with run, MetricSinks(config, run, told, after=after) as found:
                yield found

    return opened


def configuration(folder, sinks, timeout=300.0, **sections) -> RunConfig:
    named = [{**one, "sink": re.sub("^sinks.py", str(folder / "sinks.py"), one["sink"])} for one in sinks]
    return RunConfig.model_validate(
        {
            "model": {"config": {"model_type": "qwen3"}, "tokenizer": "t"},
            "data": {"source": "jsonl", "options": {"api_key": "topsecret"}},
            "rewards": [{"function": "exact_match"}],
            "trainer": {"output_dir": str(folder / "run")},
            "tracking": {"sinks": named, "close_timeout_s": timeout},
            **sections,
        }
    )
