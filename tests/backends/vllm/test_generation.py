"""What vLLM generates behind Anytron's engine, and what it is worth, against plain Hugging Face code."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from anytron.base.errors import EngineError
from anytron.workers.engines.rollout_engine import PromptInputs
from tests.needs_vllm import NEEDS_VLLM
from tests.vllm_models import answers, largest_difference, log_probs, requests

pytestmark = NEEDS_VLLM

PROMPTS = [(3, 1, 9, 5, 10), (7, 10), (2, 2, 8, 10), (1, 10), (9, 9, 9, 9, 9, 9, 10)] * 12
END = 11


@pytest.mark.parametrize(
    "how",
    [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5}, {"min_new_tokens": 5}, {"temperature": 1.7, "top_k": 4}],
)
def test_log_probs_are_the_model_s_own_at_the_temperature(loaded, how):
    asked = requests(PROMPTS, end_token_ids=(END, 4), **how)
    answered = answers(loaded.engine, asked)
    assert largest_difference(loaded.model, asked, answered) < 5e-6
    assert len({len(response.tokens) for response in answered}) > 1
    assert {version for response in answered for version in response.versions} == {loaded.version}
    assert all(len(one.tokens) == len(one.log_probs) == len(one.versions) for one in answered)


def test_prompts_that_fill_several_steps_of_the_engine(loaded):
    """On a CPU vLLM cannot compute a part of a prompt whose response has a seed."""
    asked = requests([prompt * 12 for prompt in PROMPTS])
    assert sum(len(prompt) for prompt in PROMPTS) * 12 > 4 * 512
    assert largest_difference(loaded.model, asked, answers(loaded.engine, asked)) < 5e-6


def test_a_response_ends_with_its_first_end_token_and_not_before_the_shortest_length(loaded):
    for shortest in (0, 5):
        answered = answers(loaded.engine, requests(PROMPTS, end_token_ids=(END, 4), min_new_tokens=shortest))
        for response in answered:
            ends = [token in (END, 4) for token in response.tokens]
            assert sum(ends) == (response.stop_reason == "stop")
            assert ends[-1] == (response.stop_reason == "stop")
            assert response.stop_reason == "stop" or len(response.tokens) == 8
        assert min(len(response.tokens) for response in answered) > shortest
        assert {response.stop_reason for response in answered} == {"stop", "length"}


def test_the_checkpoint_s_end_token_has_no_say(loaded):
    answered = answers(loaded.engine, requests(PROMPTS))
    assert all((len(one.tokens), one.stop_reason) == (8, "length") for one in answered)
    assert any(END in one.tokens[:-1] for one in answered)


def test_a_stop_string_ends_a_response_and_belongs_to_it(loaded):
    answered = answers(loaded.engine, requests(PROMPTS, stop=("77", "5")))
    for response in answered:
        text = "".join(str(token) if token < 10 else "." for token in response.tokens)
        assert (response.stop_reason == "stop") == text.endswith(("77", "5"))
        assert "5" not in text[:-1]
        assert "77" not in text[:-1]
    assert {response.stop_reason for response in answered} == {"stop", "length"}


def test_a_stop_string_counts_from_the_shortest_length_on(loaded):
    for response in answers(loaded.engine, requests(PROMPTS, stop=("5",), min_new_tokens=4)):
        text = "".join(str(token) if token < 10 else "." for token in response.tokens)
        ends = next((count for count in range(4, 9) if "5" in text[max(0, count - 3) : count]), None)
        assert (len(text), response.stop_reason) == ((ends, "stop") if ends else (8, "length"))


def test_tokens_follow_from_the_seed_alone(loaded):
    asked = requests(PROMPTS, end_token_ids=(END,))
    together = [response.tokens for response in answers(loaded.engine, asked)]
    assert [one.tokens for one in answers(loaded.engine, asked[::-1])][::-1] == together
    assert [answers(loaded.engine, [one])[0].tokens for one in asked[:6]] == together[:6]
    others = [replace(request, seed=request.seed + 1) for request in asked]
    assert [one.tokens for one in answers(loaded.engine, others)] != together


def test_the_sampled_distribution_is_the_model_s(loaded):
    asked = requests([PROMPTS[0]] * 3000, max_new_tokens=1, temperature=0.7)
    counts = Counter(response.tokens[0] for response in answers(loaded.engine, asked))
    with torch.no_grad():
        expected = (loaded.model(torch.tensor([PROMPTS[0]])).logits[0, -1] / 0.7).softmax(-1)
    drawn = torch.tensor([counts[token] / 3000 for token in range(16)])
    # Four standard deviations of a frequency over 3000 draws.
    assert torch.all((drawn - expected).abs() < 4 * (expected * (1 - expected) / 3000).sqrt() + 1e-9)


def test_top_k_and_top_p_draw_from_the_head_only(loaded):
    with torch.no_grad():
        probabilities = loaded.model(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1)
    order = probabilities.argsort(descending=True).tolist()
    nucleus = next(count for count in range(1, 17) if probabilities[order[:count]].sum() >= 0.5)
    for how, head in (({"top_k": 2}, 2), ({"top_p": 0.5}, nucleus)):
        asked = requests([PROMPTS[0]] * 200, max_new_tokens=1, **how)
        assert {response.tokens[0] for response in answers(loaded.engine, asked)} == set(order[:head])


def test_what_is_given_up_has_its_tokens_so_far_and_the_others_are_as_without_it(loaded):
    asked = requests(PROMPTS[:4], max_new_tokens=20)
    whole = answers(loaded.engine, asked)
    loaded.engine.submit(asked)
    assert loaded.engine.poll(0.0) == []
    assert loaded.engine.poll(0.0) == []

    given_up = loaded.engine.abort([1, 3, 99])

    assert [number for number, _ in given_up] == [1, 3]
    for number, response in given_up:
        assert (response.stop_reason, response.tokens) == ("abort", whole[number].tokens[:2])
        assert response.log_probs == pytest.approx(whole[number].log_probs[:2], abs=5e-6)
    found = {}
    while len(found) < 2:
        found |= dict(loaded.engine.poll(1.0))
    assert {number: one.tokens for number, one in found.items()} == {0: whole[0].tokens, 2: whole[2].tokens}
    loaded.engine.submit(asked)
    assert [number for number, _ in loaded.engine.abort()] == [0, 1, 2, 3]
    assert loaded.engine.poll(1.0) == []


def test_requests_that_cannot_be_answered_rightly_are_refused(loaded):
    with pytest.raises(EngineError, match=r"(?s)too little room.*500 tokens and .* up to 13, .*vLLM allows 512"):
        loaded.engine.submit(requests([(1,) * 500], max_new_tokens=13))
    loaded.engine.submit(requests(PROMPTS[:1], temperature=0.5))
    with pytest.raises(EngineError, match=r"(?s)temperature cannot change.*sampled at 0\.5, and the new value is 0\.6"):
        loaded.engine.submit(requests(PROMPTS[:1], first=1, temperature=0.6))
    loaded.engine.abort()


def test_logits_are_hugging_face_s_up_to_a_constant_of_each_row(loaded):
    answers(loaded.engine, requests(PROMPTS[:2], temperature=0.5))
    sequences = [(3, 1, 9, 5, 10), (7,), (1,) * 140]
    found = loaded.engine.logits([PromptInputs(tokens) for tokens in sequences])
    for tokens, rows in zip(sequences, found, strict=True):
        with torch.no_grad():
            expected = loaded.model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        torch.testing.assert_close(rows, expected, atol=5e-6, rtol=0)


def test_it_says_what_it_is(loaded):
    facts = loaded.engine.describe()
    assert facts["engine"] == "vllm"
    assert facts["model"] == "Qwen3ForCausalLM"
    assert set(facts["versions"]) == {"torch", "transformers", "vllm"}


def test_log_probs_of_the_tests_tell_temperatures_apart(loaded):
    """Otherwise the tests above would show little."""
    (one,) = answers(loaded.engine, requests(PROMPTS[:1], temperature=0.5))
    assert (log_probs(loaded.model, PROMPTS[0], one.tokens) - torch.tensor(one.log_probs)).abs().max() > 0.1


def test_vllm_has_no_batch_invariant_mode_on_a_processor():
    """Why the engine declines ``engine.on_policy=bitwise`` there (docs/how-to/train-on-policy-to-the-bit.md)."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert CPUAttentionBackend.supports_batch_invariance() is False
