"""The order of prompts in epochs, and what is said of an order that is wrong."""

from __future__ import annotations

import pytest
import torch

from anytron.proof.verification.epochs import mistake_in
from anytron.task.data.mixture import EpochSampler, Mixture


class Table(list):
    """Prompts of a source; each is its own id."""

    name = "table"

    def data(self):
        return [(prompt.id, {}) for prompt in self]


class Named:
    def __init__(self, name):
        self.id = name


def mix(count=20, *, shuffle=True):
    return Mixture([Table(Named(f"prompt-{index}") for index in range(count))], None, seed=1, shuffle=shuffle)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("count", [1, 2, 20])
def test_prompts_in_their_order_are_right(count, shuffle):
    assert mistake_in(mix(count, shuffle=shuffle), shuffle=shuffle) == ""


def test_prompts_of_one_name_have_no_order_that_shows():
    same = Mixture([Table(Named("a question") for _ in range(20))], None, seed=1, shuffle=True)
    assert mistake_in(same, shuffle=True) == ""


def twice(self, epoch):
    order = EpochSampler._right(self, epoch)
    return torch.cat([order[:-1], order[:1]])


@pytest.mark.parametrize(
    ("order", "shuffle", "says"),
    [
        (lambda self, epoch: EpochSampler._right(self, 0), True, "same order in each epoch"),
        (lambda self, epoch: EpochSampler._right(self, epoch).roll(epoch), False, "another order in each epoch"),
        (twice, True, "lacks prompts, and has others twice"),
    ],
)
def test_a_wrong_order_is_named(order, shuffle, says, monkeypatch):
    monkeypatch.setattr(EpochSampler, "_right", EpochSampler._order_of, raising=False)
    monkeypatch.setattr(EpochSampler, "_order_of", order)
    assert says in mistake_in(mix(shuffle=shuffle), shuffle=shuffle)


def test_a_resume_at_another_place_is_named(monkeypatch):
    seek = EpochSampler.seek
    monkeypatch.setattr(EpochSampler, "seek", lambda self, epoch, position: seek(self, epoch, max(0, position - 1)))
    assert "after a resume" in mistake_in(mix(), shuffle=False) or "lacks" in mistake_in(mix(), shuffle=False)
