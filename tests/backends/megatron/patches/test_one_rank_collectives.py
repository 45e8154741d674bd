"""A replica that is alone communicates with nobody, and two replicas as before."""

import pytest

ALONE = {"gradient": [1.0], "parameters": [[1.0]]}
REPLICAS = {"gradient": [1.5], "parameters": [[1.0], [2.0]]}


@pytest.fixture(scope="module")
def facts(run_program, tmp_path_factory):
    return run_program("one_rank_collectives.py", world=2, tmp_path=tmp_path_factory.mktemp("collectives"))


@pytest.mark.some(2)
@pytest.mark.parametrize("state", ["unpatched", "patched"])
@pytest.mark.parametrize("overlap", ["", ", overlapping"])
def test_buffers_hold_what_they_held(facts, state, overlap):
    for name, expected in (("alone", ALONE), ("replicas", REPLICAS)):
        found = facts[state][name + overlap]
        assert {key: found[key] for key in expected} == expected


def test_alone_no_thread_starts(facts):
    assert facts["outcome"] == ["applied", "applied"]
    assert facts["unpatched"]["alone"]["threads"] > 0, "gloo's threads start teams of their own"
    assert facts["patched"]["alone"]["threads"] <= 0, "those of groups that were left may end meanwhile"
