"""Groups of one rank are one group: fewer threads, and every other group communicates as before."""

import pytest

SUMS = {
    "tensor": {"tensor": 3, "pipeline": 1, "data": 1, "context": 1},
    "pipeline": {"tensor": 1, "pipeline": 3, "data": 1, "context": 1},
    "data": {"tensor": 1, "pipeline": 1, "data": 3, "context": 1},
}
"""The sum of (rank + 1) on rank 0 over each axis, by the axis that two ranks are split along."""


@pytest.fixture(scope="module")
def facts(run_program, tmp_path_factory):
    return run_program("one_rank_groups.py", world=2, tmp_path=tmp_path_factory.mktemp("groups"))


@pytest.mark.parametrize("split", SUMS)
def test_a_rank_shares_its_groups_of_one_and_no_other(facts, split):
    first, second = (facts["patched"][split]["costs"][turn]["alone"] for turn in (0, 1))
    assert 1 <= first <= 2, "older versions ask for one of the groups without their timeout"
    assert second == 0, "the second split finds what the first made"
    for before, after in zip(facts["unpatched"][split]["costs"], facts["patched"][split]["costs"], strict=True):
        assert before["alone"] > 5
        assert after["together"] == before["together"]
        assert before["threads"] - after["threads"] >= 2 * (before["alone"] - after["alone"])


@pytest.mark.parametrize("split", SUMS)
@pytest.mark.parametrize("state", ["unpatched", "patched"])
def test_every_axis_communicates_after_each_split(facts, state, split):
    assert facts[state][split]["sums"] == [SUMS[split]] * 2


def test_groups_that_differ_stay_apart(facts):
    assert facts["outcome"] == ["applied"]
    assert all(facts["apart"].values()), facts["apart"]
