"""Several sources in one run: shares, epochs, resumption."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anytron.task.data import mixture
from anytron.task.data.columns import in_memory
from anytron.task.data.mixture import EpochSampler, Mixture, next_source
from anytron.task.data.prompts import TokenizedPrompt
from anytron.task.data.table import PromptTable

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=5)
WEIGHT = st.one_of(st.integers(1, 50), st.floats(0.01, 100.0))


def table(name, size):
    prompts = [TokenizedPrompt(f"{name}{index}", "", (index + 1,), {}) for index in range(size)]
    return PromptTable(name, in_memory(prompts))


def make(sizes, weights=None, seed=3, shuffle=True):
    return Mixture(
        [table("abcde"[index], size) for index, size in enumerate(sizes)], weights, seed=seed, shuffle=shuffle
    )


@st.composite
def mixes(draw):
    sizes = draw(SIZES)
    count = len(sizes)
    return sizes, draw(st.none() | st.lists(WEIGHT, min_size=count, max_size=count))


def ids(prompts):
    return [prompt.id for prompt in prompts]


def assert_shares(weights, draws):
    """Every source has given its share after every draw: Tijdeman's bound, in exact numbers."""
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    bound = 1 - Fraction(1, max(1, 2 * len(weights) - 2))
    drawn = [0] * len(weights)
    for number in range(1, draws + 1):
        drawn[mixture.next_source(drawn, shares)] += 1
        assert max(abs(number * share - count) for share, count in zip(shares, drawn, strict=True)) <= bound


@settings(deadline=None, max_examples=150)
@given(st.lists(WEIGHT, min_size=1, max_size=6), st.integers(1, 200))
def test_after_every_draw_each_source_has_given_its_share_to_within_one_prompt(weights, draws):
    assert_shares(weights, draws)


@pytest.mark.parametrize(
    "sabotaged",
    [
        lambda drawn, shares: sum(drawn) % len(shares),
        lambda drawn, shares: max(range(len(shares)), key=lambda index: shares[index]),
        # Without the rule that no source gets too far ahead, and without the one that none falls too far behind.
        lambda drawn, shares: min(range(len(shares)), key=lambda index: (drawn[index] + 1) / shares[index]),
        lambda drawn, shares: next(i for i, w in enumerate(shares) if (sum(drawn) + 1) * w - drawn[i] > 0),
    ],
)
def test_another_order_of_the_sources_is_noticed(sabotaged, monkeypatch):
    monkeypatch.setattr(mixture, "next_source", sabotaged)
    with pytest.raises(AssertionError):
        assert_shares([9, 1, 1, 1], 60)


@settings(deadline=None)
@given(mixes(), st.integers(1, 60))
def test_what_is_drawn_is_what_the_sources_give_in_their_own_epochs(mix, count):
    sizes, weights = mix
    drawn = ids(make(sizes, weights).draw(count))
    for name, size in zip("abcde", sizes, strict=False):
        own = [one for one in drawn if one[0] == name]
        for start in range(0, len(own) - size + 1, size):
            assert len(set(own[start : start + size])) == size, "every prompt of the source once in an epoch"


@settings(deadline=None)
@given(SIZES, st.integers(1, 3))
def test_without_weights_an_epoch_of_the_mix_has_every_prompt_once(sizes, epochs):
    drawn = ids(make(sizes).draw(sum(sizes) * epochs))
    assert set(Counter(drawn).values()) == {epochs}
    assert len(set(drawn)) == sum(sizes)
    assert set(Counter(drawn[: sum(sizes)]).values()) == {1}


@settings(deadline=None)
@given(mixes(), st.lists(st.integers(0, 12), max_size=8), st.integers(1, 30), st.booleans())
def test_a_resumed_mix_goes_on_as_if_it_had_not_stopped(mix, before, after, shuffle):
    whole, stopped = make(*mix, shuffle=shuffle), make(*mix, shuffle=shuffle)
    for count in before:
        whole.draw(count)
        stopped.draw(count)
    resumed = make(*mix, shuffle=shuffle)
    resumed.seek(stopped.places)
    assert resumed.places == whole.places
    assert ids(resumed.draw(after)) == ids(whole.draw(after))


@settings(deadline=None)
@given(mixes(), st.lists(st.integers(0, 9), max_size=6))
def test_the_size_of_a_draw_changes_nothing(mix, counts):
    one, other = make(*mix), make(*mix)
    assert ids(one.draw(sum(counts))) == [name for count in counts for name in ids(other.draw(count))]


def test_a_mix_of_one_draws_as_a_source_alone():
    own = EpochSampler(table("a", 9), seed=3, shuffle=True)
    assert ids(make([9]).draw(30)) == ids(own.draw(30))


def test_weights_are_proportions_whatever_their_scale():
    assert make([5, 5], [0.1, 0.3]).shares == make([2, 7], [1, 3]).shares == (Fraction(1, 4), Fraction(3, 4))
    assert Counter(name[0] for name in ids(make([5, 5], [1, 3]).draw(32))) == {"a": 8, "b": 24}


def test_equal_sources_have_orders_of_their_own():
    drawn = ids(Mixture([table("a", 50), table("b", 50)], None, seed=3, shuffle=True).draw(100))
    assert [one[1:] for one in drawn if one[0] == "a"] != [one[1:] for one in drawn if one[0] == "b"]


def test_a_place_of_another_mix_is_refused():
    with pytest.raises(ValueError, match=r"longer|shorter"):
        make([3, 4]).seek([(0, 1)])
    with pytest.raises(ValueError, match="3 items"):
        make([3, 4]).seek([(0, 4), (0, 0)])


def test_what_is_mixed_is_said():
    assert make([3, 1], [1, 3]).remarks == ["mix of prompts: 25.0% a (3), 75.0% b (1)"]
    assert make([3]).remarks == []
    assert next_source([7], [Fraction(1)]) == 0
