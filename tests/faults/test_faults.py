"""Faults happen to small runs, which end as if nothing had happened."""

from __future__ import annotations

import functools

import pytest

from tests.faults.catalog import FAULTS
from tests.faults.faults import survive, undisturbed


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Give the undisturbed run of a layout."""
    return functools.cache(lambda layout: undisturbed(tmp_path_factory.mktemp("undisturbed"), layout))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_run_survives(fault, reference, tmp_path):
    outcomes = survive(fault, tmp_path, reference(fault.layout))

    assert [outcome.difference for outcome in outcomes if not outcome.survived] == []


def test_there_are_as_many_faults_as_promised_each_with_a_name_of_its_own():
    names = [name for fault in FAULTS for name in fault.names]

    assert len(names) == len(set(names)) >= 24
