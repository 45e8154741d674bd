"""Which cases of a test are left to ``tox -e slow``."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.slow import kept, mark_others_slow, without_families


@given(st.integers(1, 200), st.integers(1, 200))
def test_as_many_cases_stay_as_asked_and_the_last_is_among_them(cases, count):
    places = kept(cases, count)
    assert len(set(places)) == min(cases, count)
    assert places[-1] == cases - 1
    assert min(places) >= 0


class Case:
    """A case of a test, as pytest collects it."""

    def __init__(self, nodeid, *marks):
        self.nodeid, self.marks = nodeid, {mark.name: mark for mark in marks}

    def get_closest_marker(self, name):
        return self.marks.get(name)

    def add_marker(self, mark):
        self.marks[mark.name] = mark


def test_the_others_are_slow_and_a_test_without_the_mark_is_whole():
    some = pytest.mark.some(2).mark
    items = [Case(f"a.py::test[{number}]", some) for number in range(5)]
    items.insert(1, Case("a.py::test[slow]", some, pytest.mark.slow.mark))
    items += [Case(f"a.py::other[{number}]") for number in range(3)]
    mark_others_slow(items)
    assert [item.nodeid for item in items if "slow" not in item.marks] == [
        "a.py::test[2]", "a.py::test[4]", "a.py::other[0]", "a.py::other[1]", "a.py::other[2]",
    ]  # fmt: skip


def test_families_are_left_to_their_own_run_but_for_those_that_are_slow_too():
    families, slow = pytest.mark.families.mark, pytest.mark.slow.mark
    items = [Case("a", families), Case("b", families, slow), Case("c", slow), Case("d")]
    assert [item.nodeid for item in without_families(items)] == ["b", "c", "d"]
