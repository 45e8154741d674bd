"""What a reward process writes into the memory that it shares with the driver costs its own samples at most."""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from anytron.base.errors import DataError
from anytron.config.scoring import RewardSection
from anytron.task.rewards.scoring import RewardSum
from tests.core.task.rewards.scribbling import NUMBERS
from tests.core.task.rewards.test_processes import sample
from tests.slow import slow_but

HOSTILE = Path(__file__).with_name("scribbling.py")
TIMEOUT_S = 1.0
NONSENSE = [*NUMBERS, "at random"]


@contextmanager
def started(tmp_path, function, **settings):
    section = RewardSection(function=f"{HOSTILE}:{function}", timeout_s=TIMEOUT_S, **settings)
    with RewardSum.from_config([section]).start(tmp_path / "logs", start_timeout_s=60) as score:
        yield score


@pytest.mark.some(1)
@pytest.mark.parametrize("numbers", slow_but(NONSENSE, "never", "at random"))
def test_nonsense_costs_the_sample_that_hangs_or_dies_and_no_other(tmp_path, numbers):
    with started(tmp_path, "scribbles", options={"numbers": numbers}) as score:
        assert score([sample("abc"), sample("a")]).total.tolist() == [3, 1]  # the process is up
        began = time.monotonic()
        scores = score([sample("abc"), sample("hangs"), sample("ab", 1), sample("dies", 1)])
        assert time.monotonic() - began < 60
        assert scores.total[[0, 2]].tolist() == [3, 2]
        assert scores.total[[1, 3]].isnan().all()
        late, dead = scores.failures["scribbles"].values()
        assert (late.what, dead.what) == ("A reward function took too long.", "A reward process died.")
        assert score([sample("abcd")]).total.tolist() == [4]


@pytest.mark.parametrize("numbers", slow_but(NONSENSE, "never", "at random"))
@pytest.mark.parametrize("fate", ["hangs", "dies"])
def test_an_error_names_no_sample_that_there_is_not(tmp_path, numbers, fate):
    named = "took too long" if fate == "hangs" else "process died"
    with (
        started(tmp_path, "scribbles", options={"numbers": numbers}, on_error="stop") as score,
        pytest.raises(DataError, match=rf"{named}") as error,
    ):
        score([sample("abc"), sample(fate, 7)])
    assert error.value.where == "reward scribbles"
    assert str(error.value).count("\n") < 60


def test_the_memory_cannot_be_taken_away_under_the_driver(tmp_path):
    with started(tmp_path, "truncates", on_error="stop") as score, pytest.raises(DataError) as error:
        score([sample("abc")])
    assert "PermissionError" in error.value.why


@pytest.mark.slow
def test_a_function_that_takes_its_samples_again_and_again_has_the_time_of_each(tmp_path):
    with started(tmp_path, "runs_in_circles") as score:
        assert score([sample("abc")]).total.tolist() == [3]
        began = time.monotonic()
        scores = score([sample("abc"), sample("circles")])
        assert (3 + 2) * TIMEOUT_S <= time.monotonic() - began < 60  # all at once, and alone
        assert scores.total[0] == 3
        assert math.isnan(scores.total[1])
