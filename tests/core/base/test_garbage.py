"""Garbage is collected when a process says so, also garbage that was exempt before."""

import gc
import weakref

import pytest

from anytron.base.garbage import collect_all, exempt_objects, no_collections, no_exemptions


class Cycle:
    """An object that refers to itself: only a collection frees it."""

    def __init__(self):
        self.me = self


@pytest.fixture(autouse=True)
def _thawed():
    yield
    exempt_objects()  # as tests/conftest.py leaves it


@pytest.mark.parametrize("collecting", [True, False])
def test_nothing_is_collected_in_the_block(collecting):
    if not collecting:
        gc.disable()
    try:
        with no_collections():
            gone = weakref.ref(Cycle())
            kept = [[] for _ in range(100_000)]  # without the block, more than a hundred collections
            assert gone() is not None
            assert len(kept) == 100_000
        assert gc.isenabled() == collecting
    finally:
        gc.enable()


def test_the_collector_works_again_after_an_error():
    with pytest.raises(ValueError, match="in the block"), no_collections():
        raise ValueError("in the block")
    assert gc.isenabled()


def test_objects_are_exempt_until_all_are_collected():
    cycle = Cycle()
    exempt_objects()
    gone = weakref.ref(cycle)
    del cycle

    gc.collect()
    assert gone() is not None, "it is exempt, so no collection looks at it"

    collect_all()
    assert gone() is None, "an engine that is replaced gives its memory back"


def test_what_a_run_leaves_is_collected_when_the_next_one_begins():
    cycle = Cycle()
    exempt_objects()
    gone = weakref.ref(cycle)
    del cycle

    exempt_objects()

    assert gone() is None


def test_garbage_is_collected_before_objects_are_exempt():
    gone = weakref.ref(Cycle())

    exempt_objects()

    assert gone() is None


def test_an_exempt_object_is_freed_with_its_last_reference():
    freed = []
    thing = Cycle()
    weakref.finalize(thing, freed.append, True)
    exempt_objects()

    thing.me = None
    del thing

    assert freed


@pytest.mark.some(1)
@pytest.mark.parametrize("exempt", [exempt_objects, gc.freeze], ids=["by Anytron", "by others"])
def test_who_refers_to_an_object_is_found_also_if_anytron_has_exempted_it(exempt):
    collect_all()
    held = object()
    holder = [held]
    exempt()
    assert gc.get_referrers(held) == []

    with no_exemptions():
        found = gc.get_referrers(held)

    assert [one is holder for one in found] == ([True] if exempt is exempt_objects else [])
    assert gc.get_referrers(held) == []


def test_nothing_is_exempt_after_the_block_if_nothing_was():
    collect_all()
    with no_exemptions():
        pass
    assert gc.get_freeze_count() == 0
