"""The order in which prompts are drawn."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from anytron.task.data.mixture import EpochSampler


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 30), st.integers(1, 5), st.booleans())
def test_every_epoch_has_every_item_once(count, batch, draws, shuffle):
    sampler = EpochSampler(range(count), seed=0, shuffle=shuffle)
    drawn = [item for _ in range(draws) for item in sampler.draw(batch)]
    assert len(drawn) == draws * batch
    for start in range(0, len(drawn) - count + 1, count):
        assert Counter(drawn[start : start + count]) == Counter(range(count))


def test_epochs_and_seeds_have_orders_of_their_own():
    sampler = EpochSampler(range(50), seed=3, shuffle=True)
    first, second = sampler.draw(50), sampler.draw(50)
    assert first != second
    assert EpochSampler(range(50), seed=3, shuffle=True).draw(50) == first
    assert EpochSampler(range(50), seed=4, shuffle=True).draw(50) != first


def test_without_shuffling_the_order_is_the_source_s():
    assert EpochSampler("abc", seed=0, shuffle=False).draw(5) == ["a", "b", "c", "a", "b"]
