"""What routing a driver takes from a rollout engine."""

import pytest
import torch

from anytron.workers.engines.rollout_engine import RoutingShape

SHAPE = RoutingShape(layers=3, chosen=2, experts=8)
RIGHT = torch.rand(5, 3, 8, generator=torch.Generator().manual_seed(0)).topk(2).indices.to(torch.uint8)


def changed(place, value, routing=RIGHT):
    routing = routing.clone()
    routing[place] = value
    return routing


def test_every_token_but_the_last_goes_to_different_experts():
    assert SHAPE.mistake_in(RIGHT, 6) is None
    assert SHAPE.mistake_in(RIGHT[:0], 1) is None


@pytest.mark.parametrize(
    ("routing", "mistake"),
    [
        (None, "it has no routing"),
        (RIGHT[:4], "its routing is torch.uint8 (4, 3, 2), expected torch.uint8 (5, 3, 2)"),
        (RIGHT[:, :2], "(5, 2, 2), expected"),
        (RIGHT[:, :, :1], "(5, 3, 1), expected"),
        (RIGHT.long(), "its routing is torch.int64 (5, 3, 2), expected torch.uint8"),
        (changed((4, 2, 1), 8), "its routing names expert 8, but experts are numbered from 0 to 7"),
        (changed((2, 1), 5), "its routing sends a token to the same expert twice"),
    ],
)
def test_anything_else_is_a_mistake(routing, mistake):
    assert mistake in SHAPE.mistake_in(routing, 6)


@pytest.mark.parametrize(("experts", "dtype"), [(256, torch.uint8), (257, torch.int16)])
def test_the_type_holds_every_expert(experts, dtype):
    shape = RoutingShape(layers=1, chosen=1, experts=experts)
    assert shape.dtype is dtype
    assert shape.mistake_in(torch.tensor([[[experts - 1]]]).to(dtype), 2) is None


def test_a_negative_number_is_no_expert():
    shape = RoutingShape(layers=1, chosen=2, experts=300)
    mistake = shape.mistake_in(torch.tensor([[[-1, 4]]], dtype=torch.int16), 2)
    assert mistake == "its routing names expert -1, but experts are numbered from 0 to 299"
