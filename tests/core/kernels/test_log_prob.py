"""The chunked log-prob kernel, against torch's own softmax in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anytron.kernels.contract import LogProbSpec
from anytron.kernels.log_prob import make_log_prob

torch.set_num_threads(1)


def naive(hidden, weight, labels, temperature, vocab_size):
    logits = (hidden @ weight[:vocab_size].t()) / temperature
    distribution = torch.distributions.Categorical(logits=logits)
    real = labels >= 0
    log_probs = distribution.log_prob(labels.clamp(min=0)) * real
    return log_probs, distribution.entropy() * real


@settings(deadline=None, max_examples=40)
@given(
    tokens=st.integers(1, 13),
    chunk=st.integers(1, 16),
    padding=st.integers(0, 3),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    seed=st.integers(0, 1000),
)
def test_log_probs_entropies_and_gradients_equal_the_definition(tokens, chunk, padding, temperature, seed):
    generator = torch.Generator().manual_seed(seed)
    vocab, size = 11, 5
    hidden = torch.randn(tokens, size, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab + padding, size, generator=generator, dtype=torch.float64)
    labels = torch.randint(-1, vocab, (tokens,), generator=generator)
    labels[labels < 0] = -100
    up_log_probs, up_entropy = torch.randn(2, tokens, generator=generator)

    expected_inputs = [t.clone().requires_grad_() for t in (hidden, weight)]
    expected = naive(*expected_inputs, labels, temperature, vocab)
    (expected[0] * up_log_probs + expected[1] * up_entropy).sum().backward()

    kernel = make_log_prob(LogProbSpec(vocab_size=vocab, tensor_parallel=1, chunk_tokens=chunk))
    inputs = [t.float().requires_grad_() for t in (hidden, weight)]
    actual = kernel(*inputs, labels, temperature, None)
    (actual[0] * up_log_probs + actual[1] * up_entropy).sum().backward()

    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-4)
    for got, want in zip(inputs, expected_inputs, strict=True):
        torch.testing.assert_close(got.grad.double(), want.grad, atol=1e-4, rtol=1e-4)


def test_no_more_than_a_chunk_of_logits_exists_at_one_time(monkeypatch):
    seen = []
    linear = torch.nn.functional.linear

    def watched(*args):
        seen.append(linear(*args))
        return seen[-1]

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    kernel = make_log_prob(LogProbSpec(vocab_size=7, tensor_parallel=1, chunk_tokens=4))
    hidden, weight = torch.randn(10, 3, requires_grad=True), torch.randn(7, 3, requires_grad=True)
    log_probs, _ = kernel(hidden, weight, torch.zeros(10, dtype=torch.int64), 1.0, None)
    log_probs.sum().backward()
    assert [tuple(logits.shape) for logits in seen] == [(4, 7), (4, 7), (2, 7)] * 2


@pytest.mark.parametrize("extreme", [1e4, -1e4])
def test_extreme_logits_stay_finite(extreme):
    kernel = make_log_prob(LogProbSpec(vocab_size=4, tensor_parallel=1, chunk_tokens=8))
    hidden = torch.full((2, 1), extreme, requires_grad=True)
    weight = torch.tensor([[1.0], [0.5], [-1.0], [0.0]], requires_grad=True)
    log_probs, entropy = kernel(hidden, weight, torch.tensor([0, 3]), 1.0, None)
    (log_probs + entropy).sum().backward()
    assert torch.isfinite(log_probs).all()
    assert torch.isfinite(entropy).all()
    assert torch.isfinite(hidden.grad).all()
