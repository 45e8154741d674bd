"""Which devices a process sees."""

from hypothesis import given
from hypothesis import strategies as st

from anytron.executor.environment import ranks_beside, with_devices


@given(st.integers(1, 20), st.integers(1, 20))
def test_replicas_share_the_training_ranks_among_them_evenly(replicas, ranks):
    shares = [ranks_beside(replica, replicas, ranks) for replica in range(replicas)]
    assert {rank for share in shares for rank in share} == set(range(ranks))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    if replicas <= ranks:
        assert sum(sizes) == ranks, "none has two"
    else:
        users = [sum(rank in share for share in shares) for rank in range(ranks)]
        assert max(users) - min(users) <= 1


def test_devices_are_counted_among_those_that_are_visible():
    assert with_devices({"CHIPS": "4,5,7", "HOME": "/"}, "CHIPS", [0, 2]) == {"CHIPS": "4,7", "HOME": "/"}
    assert with_devices({"CHIPS": ""}, "CHIPS", range(2)) == with_devices({}, "CHIPS", [0, 1]) == {"CHIPS": "0,1"}
