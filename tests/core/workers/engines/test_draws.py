"""Random numbers of each response's own, and the tokens that they draw."""

from __future__ import annotations

import torch

from anytron.workers.engines.sampling import draw, uniform_numbers

MODULUS = 1 << 64


def splitmix64(seed, count):
    """The generator as it is published, one number after the other, in Python's integers."""
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) % MODULUS
        z = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) % MODULUS
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % MODULUS
        yield z ^ (z >> 31)


def test_the_oracle_is_the_published_generator():
    """First numbers of seed 1234567, from the reference implementation's test vectors (rosettacode.org)."""
    assert list(splitmix64(1234567, 3)) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_each_row_has_the_numbers_of_its_seed_by_position():
    seeds = [0, 1, 2**62 + 12345, 2**63 - 1]
    expected = torch.tensor([[(z >> 40) / 2**24 for z in splitmix64(seed, 50)] for seed in seeds])

    found = torch.stack([uniform_numbers(seeds, position) for position in range(50)], dim=1)

    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    assert torch.equal(uniform_numbers(seeds[::-1], 7), expected[:, 7].flip(0)), "whatever stands beside it"
    each = torch.tensor([3, 0, 49, 7])
    assert torch.equal(uniform_numbers(seeds, each), expected.gather(1, each[:, None])[:, 0]), "positions of their own"


def test_seeds_that_follow_each_other_give_unrelated_numbers():
    numbers = torch.stack([uniform_numbers(range(20_000), position) for position in (0, 1)])
    assert abs(numbers.mean().item() - 0.5) < 0.01
    assert torch.corrcoef(numbers)[0, 1].abs() < 0.03
    assert torch.corrcoef(torch.stack([numbers[0, :-1], numbers[0, 1:]]))[0, 1].abs() < 0.03


def test_numbers_in_equal_steps_draw_each_token_as_often_as_is_its_share():
    shares = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.125, 0.125, 0.0])
    uniform = torch.arange(64) / 64
    drawn = draw(shares.log().expand(64, -1) - 3.0, uniform)
    assert torch.equal(drawn.bincount(minlength=7), (64 * shares).long())
    assert torch.equal(drawn, drawn.sort().values), "the inverse of the distribution function"


def test_the_largest_number_draws_a_token_that_has_a_share():
    torch.manual_seed(0)
    log_probs = torch.randn(500, 1000)
    log_probs[:, -100:] = -torch.inf
    drawn = draw(log_probs, torch.full((500,), 1 - 2.0**-24))
    assert drawn.max() < 900
    assert drawn.min() > 800
