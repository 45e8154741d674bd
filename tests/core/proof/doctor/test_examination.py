"""A topic that crashes is an entry; the others are examined all the same."""

import re
from importlib.metadata import EntryPoint

import pytest

from anytron.base.errors import ConfigError
from anytron.base.results import Result, of_error, worst
from anytron.proof.checks import Check
from anytron.proof.doctor import examination
from tests.core.proof.doctor.conftest import by_name
from tests.house import ROOT


@pytest.mark.parametrize("table", ["TOPICS", "LIVE_TOPICS"])
def test_every_topic_may_crash(monkeypatch, table):
    """Each yields something first, and raises then."""

    def crash(*_, **__):
        yield Result("crashing.before", "passed", "as it should be")
        raise RuntimeError("a library is broken")

    def sound(*_, **__):
        yield Result("sound.all", "passed", "examined")

    for name in ("TOPICS", "LIVE_TOPICS"):
        monkeypatch.setattr(examination, name, ())
    monkeypatch.setattr(examination, table, (Check("crashing.all", crash), Check("sound.all", sound)))
    monkeypatch.setattr(examination, "entry_points", lambda group: [])  # of whatever else is installed
    monkeypatch.setenv("ANYTRON_PLATFORM", "cpu")
    first, crashed, last = examination.examine()
    assert (first.status, last.name) == ("passed", "sound.all")
    assert (crashed.name, crashed.status, crashed.group) == ("crashing.all", "failed", "crashing")
    assert crashed.detail.startswith("It raised RuntimeError: a library is broken, at 'raise RuntimeError(")
    assert crashed.fix


def test_other_distributions_add_topics(monkeypatch):
    named = {"platforms": "anytron.proof.doctor.session:examine_platform", "gone": "no_such_module:examine"}
    added = [EntryPoint(name, value, examination.GROUP) for name, value in named.items()]
    for name in ("TOPICS", "LIVE_TOPICS"):
        monkeypatch.setattr(examination, name, ())
    monkeypatch.setattr(examination, "entry_points", lambda group: added if group == "anytron.doctor" else [])
    monkeypatch.setenv("ANYTRON_PLATFORM", "cpu")
    first, *_, gone = examination.examine()
    assert (first.name, first.status) == ("platform.choice", "passed")
    assert (gone.name, gone.status) == ("gone.all", "failed")
    assert "no_such_module" in gone.detail


def test_an_error_of_ours_keeps_its_fix():
    error = ConfigError("It is wrong.", where="a.key", why="it is 3", fix="a.key=2")
    assert of_error("x.y", error) == Result("x.y", "failed", "It is wrong. a.key: it is 3", "a.key=2")


def test_the_worst_status_counts():
    assert worst([]) == "skipped"
    assert worst(["passed", "warning", "skipped"]) == "warning"
    assert worst(["warning", "failed", "passed"]) == "failed"


PAGE = (ROOT / "docs/how-to/examine-with-doctor.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "topic", [one.name.partition(".")[0] for one in (*examination.TOPICS, *examination.LIVE_TOPICS)]
)
def test_the_page_has_every_topic(topic):
    assert re.search(rf"^\| `{topic}\.", PAGE, flags=re.MULTILINE)


def test_a_platform_that_is_not_here_fails_once_and_no_other_one_is_called_active():
    with_ascend = examination.examine(ROOT / "examples/grpo_sort.yaml", ["platform.name=ascend"])
    found = by_name(with_ascend)
    failed = [name for name, entry in found.items() if entry.status == "failed"]
    assert failed == ["platform.choice"]
    assert found["configuration.file"].status == "skipped"
    assert found["plugins.cpu"].detail.startswith("available: ")
    needs = "1 training rank and 1 rollout replica need about "
    assert found["memory.training"].detail.startswith(needs), "arithmetic needs no platform"
