"""Errors: the suggestion of a near name, and what survives the way from one process to another."""

import pickle

import pytest

from anytron.base.errors import ConfigError, did_you_mean


@pytest.mark.parametrize(
    ("name", "known", "suggestion"),
    [
        ("grop", ["gae", "grpo"], "did you mean grpo?"),
        ("grop", {"gae": 1, "grpo": 2}, "did you mean grpo?"),
        ("sort", ["gae", "grpo"], ""),
        ("grop", [], ""),
    ],
)
def test_the_nearest_name_is_suggested_if_one_is_near(name, known, suggestion):
    assert did_you_mean(name, known) == suggestion


def test_the_prefix_is_shown_and_does_not_count_as_likeness():
    assert did_you_mean("plto", ["plot", "progress"], "tracking.") == "did you mean tracking.plot?"
    assert did_you_mean("tracking", ["plot", "progress"], "tracking.") == ""


def test_its_headline_says_where_it_failed():
    assert ConfigError("It failed.", where="here", why="because").headline == "It failed. (here)"
    assert ConfigError("It failed.", why="because").headline == "It failed."


def test_an_error_keeps_its_four_parts_between_processes():
    error = pickle.loads(pickle.dumps(ConfigError("It failed.", where="here", why="because", fix="do that")))

    assert (type(error), error.what, error.where, error.why, error.fix) == (
        ConfigError,
        "It failed.",
        "here",
        "because",
        "do that",
    )
    assert str(error) == "It failed.\n  where: here\n  why: because\n  fix: do that"


def test_lines_of_a_cause_are_indented_below_it():
    error = ConfigError("It failed.", why="Traceback:\n  line 1")
    assert str(error) == "It failed.\n  why: Traceback:\n      line 1"
