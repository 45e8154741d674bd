"""What ``anytron train`` tries before an engine is built: in seconds, and nothing is left behind."""

from __future__ import annotations

import os
from dataclasses import replace
from time import monotonic
from types import SimpleNamespace

import pytest

from anytron.base.errors import DataError
from anytron.config.load import load_config
from anytron.config.scoring import RewardSection
from anytron.run.preflight import rehearsal
from anytron.run.preflight.forms import samples_of
from anytron.run.preflight.prepare import prepare
from anytron.run.preflight.rehearsal import TrialProcesses, rehearse, require_earnable
from anytron.task.rewards.pool import RewardPool
from anytron.task.rewards.scoring import RewardSum
from tests.house import ROOT

FUNCTIONS = """
import os, time

calls = []

def good(samples):
    calls.append(os.getpid())
    return [float(sample.response_text == sample.data["answer"]) for sample in samples]

def calls_so_far(samples):
    calls.append(1)
    return [float(sample.response_text == sample.data["answer"]) * len(calls) for sample in samples]

def pid(samples):
    return [float(os.getpid()) * (sample.response_text == sample.data["answer"]) for sample in samples]

def only_where_right(samples):
    return [1 / 0 if sample.data["answer"] in sample.response_text else 0.0 for sample in samples]

def only_some(samples):
    for sample in samples:
        if sample.data["answer"] in sample.response_text and sample.prompt_id != "sort-0":
            raise LookupError("no such row")
    return [float(sample.response_text == sample.data["answer"]) for sample in samples]

def strict(samples):
    return [float(sample.response_text[0] == sample.data["answer"][0]) for sample in samples]

def low(samples):
    return [0.0 for _ in samples]

def slow(samples):
    time.sleep(300)

def limit(samples):
    import resource
    memory = resource.getrlimit(resource.RLIMIT_DATA)[0]
    return [float(memory) * (sample.response_text == sample.data["answer"]) for sample in samples]
"""


class Told:
    """What a run says."""

    def __init__(self):
        self.notes, self.warnings = [], []

    def note(self, text):
        self.notes.append(text)

    def warn(self, text):
        self.warnings.append(text)


@pytest.fixture(scope="module")
def config():
    return load_config(ROOT / "examples" / "grpo_sort.yaml", ["data.options.count=40"])


@pytest.fixture(scope="module")
def sorting(config):
    return prepare(config)


@pytest.fixture
def run(config, sorting, tmp_path):
    """Rehearse a run with these rewards of training and of a validation set; what it says."""
    (tmp_path / "r.py").write_text(FUNCTIONS)

    def rewarded(names):
        sections = [RewardSection(**({"function": one} if isinstance(one, str) else one)) for one in names]
        sections = [
            one.model_copy(update={"function": f"{tmp_path}/{one.function}"}) if ":" in one.function else one
            for one in sections
        ]
        return replace(sorting, rewards=RewardSum.from_config(sections))

    def rehearsed(*rewards, validation=(), look=lambda _: None):
        prepared = rewarded(rewards)
        held = [SimpleNamespace(section=SimpleNamespace(title="validation set v"), prepared=rewarded(validation))]
        with prepared.rewards.start(tmp_path / "logs", 60) as running:
            told = Told()
            require_earnable(config, prepared, held if validation else [], running, tmp_path / "logs/rehearsal", told)
            look(running)
        assert len(told.notes) + len(told.warnings) == 1, "one line"
        assert "\n" not in "".join(told.notes + told.warnings)
        return told

    return rehearsed


def test_a_function_that_fails_for_every_right_answer_is_refused_and_shown_as_it_raised(run):
    with pytest.raises(
        DataError,
        match=r"(?s)only_where_right fails for right answers.*the same for all 8 prompts that were tried"
        r".*r.py\", line \d+, in only_where_right.*ZeroDivisionError.*fix: correct the function",
    ):
        run("r.py:only_where_right")
    with pytest.raises(DataError, match=r"(?s)where: validation set v: reward only_where_right"):
        run("exact_match", validation=["r.py:only_where_right"])


def test_what_is_not_certain_is_a_warning(run):
    for name, said in {
        "low": "training: The reward low cannot be earned (8, prompt sort-0)",
        "only_some": "fails for right answers",
        "strict": "fails for a wrong answer, and a failure ends the run",
    }.items():
        (line,) = run({"function": f"r.py:{name}", "on_error": "stop"}, validation=["exact_match"]).warnings
        assert said in line
        assert "validation set v" not in line


def test_training_and_validation_are_tried_and_the_line_says_on_how_many_prompts(run):
    (line,) = run("r.py:good", "exact_match", validation=["r.py:calls_so_far", "math"]).notes
    for said in ("training: good (8)", "training: exact_match (20)", "validation set v: calls_so_far (8)", "v: math ("):
        assert said in line


@pytest.mark.usefixtures("started_cold")  # a fork of a process with many modules would have no room below the limit
def test_the_runs_processes_have_seen_nothing_of_a_function_and_no_other_is_left(run, config, sorting, tmp_path):
    def look(running):
        prompt = sorting.sampler.tables[0][0]
        assert running(samples_of([(prompt, prompt.data["answer"])], sorting)).total == 1.0, "the first call"

    run("r.py:calls_so_far", look=look)
    sections = [RewardSection(function=f"{tmp_path}/r.py:{name}", memory_gib=1.0) for name in ("pid", "limit")]
    prepared = replace(sorting, rewards=RewardSum.from_config(sections))
    with TrialProcesses(tmp_path / "trial", 60) as processes:
        found = rehearse({"training": prepared}, processes, brief=True)["training"].found
    assert found.tried == {"pid": 8, "limit": 8}
    assert found.scores["limit"]["bare"].first == 1 << 30, "its own limits"
    with pytest.raises(ProcessLookupError):
        os.kill(int(found.scores["pid"]["bare"].first), 0)


def test_registered_rewards_are_tried_in_the_processes_that_the_run_has_started(run, monkeypatch):
    started = []
    plain = RewardPool.__init__

    def counted(self, name, *arguments):
        started.append(name)
        plain(self, name, *arguments)

    monkeypatch.setattr(RewardPool, "__init__", counted)
    run("exact_match", "r.py:good", validation=["exact_match", "r.py:good"])
    assert sorted(started) == ["exact_match", "good", "good"], "the function once for the run, once to be tried"


def test_a_function_that_takes_too_long_holds_up_no_run_and_the_line_says_so(run, monkeypatch):
    monkeypatch.setattr(rehearsal, "GIVE_UP_S", 1.0)
    before = monotonic()
    (line,) = run("r.py:slow").notes
    assert line == "rehearsal: training: slow gave no answer in time"
    assert monotonic() - before < 30
