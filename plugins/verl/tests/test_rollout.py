"""The rollout ``transformers``: its server answers what transformers computes, drawn from vLLM's distribution."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [11], [5, 6, 7]]
TEMPERATURE, TOP_K, TOP_P = 0.7, 40, 0.9


@pytest.fixture(scope="module")
def found(model, ranks):
    return ranks("served.py", model)


@pytest.fixture(scope="module")
def network(model):
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def logits(network, prompt, tokens):
    """The logits that each of the tokens was drawn from, the sequence alone: ``[W, V]``."""
    with torch.no_grad():
        return network(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]


def processed(row):
    """Naively: divide by the temperature, keep the 40 likeliest, of them those before 0.9 is reached, renormalise."""
    probabilities = (row / TEMPERATURE).softmax(-1)
    likeliest = probabilities.argsort(descending=True)[:TOP_K]
    kept, total, whole = [], 0.0, float(probabilities[likeliest].sum())
    for token in likeliest.tolist():
        kept.append(token)
        total += float(probabilities[token]) / whole
        if total >= TOP_P:
            break
    result = torch.zeros_like(probabilities)
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result


def test_greedy_tokens_are_those_of_transformers(network, found):
    for prompt, (tokens, log_probs, reason) in zip(PROMPTS, found["greedy"], strict=True):
        rows = logits(network, prompt, tokens)
        assert tokens == rows.argmax(-1).tolist()
        expected = rows.log_softmax(-1).max(-1).values
        torch.testing.assert_close(torch.tensor(log_probs), expected, atol=1e-5, rtol=0)
        assert len(tokens) == 12
        assert reason == "completed"


def test_log_probs_are_those_of_the_distribution_that_is_drawn_from(network, found):
    for prompt, (tokens, log_probs, _) in zip(PROMPTS * 8, found["likely"], strict=True):
        rows = [processed(row) for row in logits(network, prompt, tokens)]
        expected = torch.stack([row[token] for row, token in zip(rows, tokens, strict=True)]).log()
        torch.testing.assert_close(torch.tensor(log_probs), expected, atol=1e-4, rtol=0)


def test_without_top_k_and_top_p_they_are_the_models_own(network, found):
    for prompt, (tokens, log_probs, _) in zip(PROMPTS * 8, found["plain"], strict=True):
        expected = logits(network, prompt, tokens).log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(log_probs), expected, atol=1e-5, rtol=0)


def test_tokens_are_as_frequent_as_they_are_probable(network, found):
    expected = processed(logits(network, PROMPTS[1], [0])[0])
    counts = torch.zeros_like(expected)
    for token, count in found["drawn"].items():
        counts[int(token)] = count
    total = counts.sum()
    assert total == 3000
    assert counts[expected == 0].sum() == 0
    deviation = (expected * (1 - expected) / total).sqrt()
    assert ((counts / total - expected).abs() <= 5 * deviation + 1e-9).all()
    assert (expected > 0).sum() > 3  # or this says nothing


def test_requests_that_come_together_are_one_batch(found):
    assert found["batches"] == [4, 32]
    assert found["one seed"]
    assert found["without log-probs"] is None


def test_responses_end_where_they_should(found):
    stop, (tokens, _, reason) = found["stop"]
    assert tokens.index(stop) == len(tokens) - 1
    assert reason == "completed"
    assert found["ended"]
    assert all(tokens.index(2) == len(tokens) - 1 for tokens in found["ended"])
    # verl's lengths: 8 of a prompt and 12 of a response, 20 together, at least 1; 2048 in the model's context.
    assert list(found["lengths"].values()) == [12, 12, 5, 1, 30, 2]


def test_responses_name_the_step_of_their_weights(found):
    assert found["steps"] == {"global_steps": 7}


def test_what_is_aborted_is_given_as_far_as_it_is(found):
    seen = found["aborted"]
    assert seen["count"] == 5
    for tokens, log_probs, reason in seen["running"]:
        assert reason == "aborted"
        assert 0 < len(tokens) == len(log_probs) < 2000
    assert seen["waiting"] == [[[], None, "aborted"]]
    assert seen["parked"]
    assert [(len(tokens), reason) for tokens, _, reason in seen["after"]] == [(2, "completed")]
    assert seen["rejected"] == [[[], None, "aborted"]]


def test_what_it_cannot_do_is_refused(found):
    assert "The rollout has no weights" in found["before"]
    expected = {
        "tensor parallelism": "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "weights of its own": "actor_rollout_ref.rollout.load_format=dummy",
        "log-probs of the model": "processed_logprobs",
        "adapters": "lora.merge=True",
        "a dtype": "bfloat16, float16 or float32",
        "a penalty": "repetition_penalty",
        "min_p": "min_p",
        "stop strings": "stop",
        "images": "image_data",
        "too long": "2048 tokens",
        "half of the weights": "A weight is missing",
        "no weights": "The rollout has no weights",
    }
    assert set(found["refused"]) == set(expected)
    for what, words in expected.items():
        assert words in found["refused"][what], what
