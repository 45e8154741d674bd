from __future__ import annotations

import pytest

from tests.core.run.rollout.replicas import Executor, pool_of, two_steps


@pytest.fixture(scope="module")
def expected():
    steps = two_steps(pool_of(Executor(), 1))
    assert [len(groups) for groups in steps] == [10, 10]
    assert {len(group) for groups in steps for group in groups} == {4}
    assert len({response.tokens for groups in steps for group in groups for response in group}) > 60
    assert {version for group in steps[1] for response in group for version in response.versions} == {2}
    return steps
