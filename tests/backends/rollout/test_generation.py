"""What is generated, and what it is worth, against plain Hugging Face code."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from anytron.engines.protocol import PromptInputs, SamplingParams
from anytron.errors import EngineError

PROMPTS = [
    PromptInputs(tokens) for tokens in ((3, 1, 9, 5, 10), (7, 10), (2, 2, 8, 10), (1, 10), (9, 9, 9, 9, 9, 9, 10))
]
END = 11


def sampling(**changes) -> SamplingParams:
    return SamplingParams(**({"samples_per_prompt": 1, "max_new_tokens": 8, "pad_token_id": 12} | changes))


@torch.no_grad()
def teacher_forced(model, prompt, response, temperature):
    """Log-probs of a response's tokens from one forward pass over the unpadded sequence, in float64."""
    logits = model(torch.tensor([[*prompt.tokens, *response]])).logits[0, len(prompt.tokens) - 1 : -1].double()
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]


def test_the_most_probable_tokens_are_those_of_plain_greedy_generation(engine, reference):
    responses = engine.generate(PROMPTS, sampling(top_k=1, end_token_ids=(END,)), seed=0)
    for prompt, (response,) in zip(PROMPTS, responses, strict=True):
        plain = reference.generate(
            torch.tensor([prompt.tokens]),
            attention_mask=torch.ones(1, len(prompt.tokens), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=8,
            eos_token_id=END,
            pad_token_id=12,
        )
        assert list(response.tokens) == plain[0, len(prompt.tokens) :].tolist()
        assert response.finished == (response.tokens[-1] == END)


@pytest.mark.parametrize(
    "how",
    [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5}, {"min_new_tokens": 5}, {"temperature": 1.7, "top_k": 4}],
)
def test_log_probs_are_the_model_s_own_at_the_temperature(engine, reference, how):
    params = sampling(samples_per_prompt=6, end_token_ids=(END, 4), **how)
    groups = engine.generate(PROMPTS, params, seed=3)
    lengths = set()
    for prompt, group in zip(PROMPTS, groups, strict=True):
        assert len(group) == 6
        for response in group:
            expected = teacher_forced(reference, prompt, response.tokens, params.temperature)
            torch.testing.assert_close(torch.tensor(response.log_probs).double(), expected, atol=2e-6, rtol=0)
            lengths.add(len(response.tokens))
    assert len(lengths) > 1, "the batch must be ragged, or the test shows little"


def test_a_response_ends_with_its_first_end_token(engine):
    groups = engine.generate(PROMPTS, sampling(samples_per_prompt=40, end_token_ids=(END, 4)), seed=1)
    responses = [response for group in groups for response in group]
    for response in responses:
        ends = [token in (END, 4) for token in response.tokens]
        assert sum(ends) == (1 if response.finished else 0)
        assert ends[-1] == response.finished
        assert response.finished or len(response.tokens) == 8
    assert {response.finished for response in responses} == {True, False}


def test_a_pad_token_that_was_drawn_is_a_token(engine):
    groups = engine.generate(PROMPTS, sampling(samples_per_prompt=60, end_token_ids=(END,)), seed=1)
    drawn = [response for group in groups for response in group if 12 in response.tokens]
    assert drawn
    assert all(response.finished or len(response.tokens) == 8 for response in drawn)


def test_no_end_token_before_the_shortest_length(engine):
    groups = engine.generate(PROMPTS, sampling(samples_per_prompt=60, end_token_ids=(END, 4), min_new_tokens=5), seed=1)
    lengths = [len(response.tokens) for group in groups for response in group]
    # The end token may be the fifth new token's successor at the earliest.
    assert min(lengths) == 6


def test_a_stop_string_ends_a_response_and_belongs_to_it(engine):
    groups = engine.generate(PROMPTS, sampling(samples_per_prompt=60, stop=("77", "5")), seed=1)
    responses = [response for group in groups for response in group]
    for response in responses:
        text = "".join(str(token) if token < 10 else "." for token in response.tokens)
        assert response.finished == (text.endswith(("77", "5")))
        assert "5" not in text[:-1]
        assert "77" not in text[:-1]
    assert {response.finished for response in responses} == {True, False}


def test_the_sampled_distribution_is_the_model_s(engine, reference):
    with torch.no_grad():
        expected = (reference(torch.tensor([PROMPTS[0].tokens])).logits[0, -1] / 0.7).softmax(-1)
    ((*responses,),) = engine.generate(
        [PROMPTS[0]], sampling(samples_per_prompt=4000, max_new_tokens=1, temperature=0.7), seed=5
    )
    counts = Counter(response.tokens[0] for response in responses)
    drawn = torch.tensor([counts[token] / 4000 for token in range(16)])
    # Four standard deviations of a frequency over 4000 draws.
    assert torch.all((drawn - expected).abs() < 4 * (expected * (1 - expected) / 4000).sqrt() + 1e-9)


def test_top_k_and_top_p_draw_from_the_head_only(engine, reference):
    with torch.no_grad():
        probabilities = reference(torch.tensor([PROMPTS[0].tokens])).logits[0, -1].softmax(-1)
    order = probabilities.argsort(descending=True).tolist()
    nucleus = next(count for count in range(1, 17) if probabilities[order[:count]].sum() >= 0.5)
    for how, head in (({"top_k": 2}, 2), ({"top_p": 0.5}, nucleus)):
        (group,) = engine.generate([PROMPTS[0]], sampling(samples_per_prompt=400, max_new_tokens=1, **how), seed=5)
        assert {response.tokens[0] for response in group} == set(order[:head])


def test_the_seed_and_nothing_else_decides(engine):
    params = sampling(samples_per_prompt=4)
    first = engine.generate(PROMPTS, params, seed=7)
    other = engine.generate(PROMPTS, params, seed=8)
    assert engine.generate(PROMPTS, params, seed=7) == first
    assert other != first


def test_nothing_generates_without_weights(new_engine):
    with pytest.raises(EngineError, match="no weights yet"):
        new_engine().generate(PROMPTS, sampling(), seed=0)
