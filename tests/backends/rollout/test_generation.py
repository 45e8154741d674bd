"""What is generated, and what it is worth, against plain Hugging Face code."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from anytron.base.errors import EngineError
from anytron.workers.engines.rollout_engine import GenerationRequest, PromptInputs, Response, SamplingParams
from anytron_conformance.tiny_models import write_tiny_model
from anytron_rollout.generation import build_model
from tests.backends.rollout.conftest import generate

PROMPTS = [
    PromptInputs(tokens) for tokens in ((3, 1, 9, 5, 10), (7, 10), (2, 2, 8, 10), (1, 10), (9, 9, 9, 9, 9, 9, 10))
]
END = 11


def sampling(**changes) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": 8, "pad_token_id": 12} | changes))


@torch.no_grad()
def teacher_forced(model, prompt, response, temperature):
    """Log-probs of a response's tokens from one forward pass over the unpadded sequence, in float64."""
    logits = model(torch.tensor([[*prompt.tokens, *response]])).logits[0, len(prompt.tokens) - 1 : -1].double()
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]


def test_the_most_probable_tokens_are_those_of_plain_greedy_generation(engine, reference):
    responses = generate(engine, PROMPTS, sampling(top_k=1, end_token_ids=(END,)), seed=0)
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
        assert (response.stop_reason == "stop") == (response.tokens[-1] == END)


@pytest.mark.parametrize(
    "how",
    [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5}, {"min_new_tokens": 5}, {"temperature": 1.7, "top_k": 4}],
)
def test_log_probs_are_the_model_s_own_at_the_temperature(engine, reference, how):
    params = sampling(end_token_ids=(END, 4), **how)
    groups = generate(engine, PROMPTS, params, seed=3, samples=6)
    lengths = set()
    for prompt, group in zip(PROMPTS, groups, strict=True):
        assert len(group) == 6
        for response in group:
            expected = teacher_forced(reference, prompt, response.tokens, params.temperature)
            torch.testing.assert_close(torch.tensor(response.log_probs).double(), expected, atol=2e-6, rtol=0)
            lengths.add(len(response.tokens))
    assert len(lengths) > 1, "the batch must be ragged, or the test shows little"


def test_a_response_ends_with_its_first_end_token(engine):
    groups = generate(engine, PROMPTS, sampling(end_token_ids=(END, 4)), seed=1, samples=40)
    responses = [response for group in groups for response in group]
    for response in responses:
        ends = [token in (END, 4) for token in response.tokens]
        assert sum(ends) == (1 if response.stop_reason == "stop" else 0)
        assert ends[-1] == (response.stop_reason == "stop")
        assert response.stop_reason == "stop" or len(response.tokens) == 8
    assert {response.stop_reason for response in responses} == {"stop", "length"}


def test_a_pad_token_that_was_drawn_is_a_token(engine):
    groups = generate(engine, PROMPTS, sampling(end_token_ids=(END,)), seed=1, samples=60)
    drawn = [response for group in groups for response in group if 12 in response.tokens]
    assert drawn
    assert all(response.stop_reason == "stop" or len(response.tokens) == 8 for response in drawn)


def test_no_end_token_before_the_shortest_length(engine):
    groups = generate(engine, PROMPTS, sampling(end_token_ids=(END, 4), min_new_tokens=5), seed=1, samples=60)
    lengths = [len(response.tokens) for group in groups for response in group]
    # The end token may be the fifth new token's successor at the earliest.
    assert min(lengths) == 6


def test_a_stop_string_ends_a_response_and_belongs_to_it(engine):
    groups = generate(engine, PROMPTS, sampling(stop=("77", "5")), seed=1, samples=60)
    responses = [response for group in groups for response in group]
    for response in responses:
        text = "".join(str(token) if token < 10 else "." for token in response.tokens)
        assert (response.stop_reason == "stop") == (text.endswith(("77", "5")))
        assert "5" not in text[:-1]
        assert "77" not in text[:-1]
    assert {response.stop_reason for response in responses} == {"stop", "length"}


def test_the_sampled_distribution_is_the_model_s(engine, reference):
    with torch.no_grad():
        expected = (reference(torch.tensor([PROMPTS[0].tokens])).logits[0, -1] / 0.7).softmax(-1)
    (responses,) = generate(engine, PROMPTS[:1], sampling(max_new_tokens=1, temperature=0.7), seed=5, samples=4000)
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
        (group,) = generate(engine, PROMPTS[:1], sampling(max_new_tokens=1, **how), seed=5, samples=400)
        assert {response.tokens[0] for response in group} == set(order[:head])


@pytest.mark.parametrize("how", [{}, {"top_p": 0.8, "end_token_ids": (END,)}], ids=["plain", "ragged"])
def test_neither_order_nor_batch_nor_padding_changes_a_token(engine, new_engine, reference, write, how):
    asked = [GenerationRequest(n, PROMPTS[n % 5], sampling(**how), seed=1000 + n) for n in range(40)]

    def responses(engine, requests):
        engine.submit(requests)
        found = {}
        while finished := engine.poll(1.0):
            found |= dict(finished)
        return found

    alone = new_engine(max_batch_size=1)
    alone.load_weights(write(reference.state_dict()))
    together, one_by_one = responses(engine, asked), responses(alone, asked)
    reverse = [replace(request, id=request.id + 100) for request in reversed(asked[:17])]
    some = {number - 100: response for number, response in responses(engine, reverse).items()}
    for found in (one_by_one, some):
        for number, response in found.items():
            assert response.tokens == together[number].tokens
            assert response.stop_reason == together[number].stop_reason
            expected = torch.tensor(together[number].log_probs)
            torch.testing.assert_close(torch.tensor(response.log_probs), expected, atol=2e-6, rtol=0)
    assert len({response.tokens for response in together.values()}) > 30, "each response has numbers of its own"


def test_requests_that_are_sampled_differently_share_an_engine(engine):
    """In one batch they cannot be; and each is made as it wants."""
    requests = [
        GenerationRequest(n, PROMPTS[0], sampling(max_new_tokens=1 + n % 3, top_k=1), seed=n) for n in range(12)
    ]
    engine.submit(requests)
    found = {}
    while finished := engine.poll(1.0):
        assert len({len(response.tokens) for _, response in finished}) == 1
        found |= dict(finished)
    assert {number: len(response.tokens) for number, response in found.items()} == {n: 1 + n % 3 for n in range(12)}


def test_what_is_given_up_is_not_made(engine):
    engine.submit([GenerationRequest(n, PROMPTS[n], sampling(), seed=n) for n in range(5)])
    assert sorted(engine.abort([1, 3, 77])) == [(n, Response((), (), "abort", ())) for n in (1, 3)]
    assert sorted(number for number, _ in engine.poll(1.0)) == [0, 2, 4]
    engine.submit([GenerationRequest(9, PROMPTS[0], sampling(), seed=9)])
    assert [number for number, _ in engine.abort()] == [9]
    assert engine.poll(1.0) == []


def test_each_token_says_which_weights_made_it(engine, reference, write):
    engine.submit([GenerationRequest(0, PROMPTS[0], sampling(), seed=0)])
    engine.load_weights(replace(write(reference.state_dict()), version=7))
    ((_, response),) = engine.poll(1.0)
    assert response.versions == (7,) * len(response.tokens)


def test_the_seed_decides(engine):
    first = generate(engine, PROMPTS, sampling(), seed=7, samples=4)
    assert generate(engine, PROMPTS, sampling(), seed=7, samples=4) == first
    assert generate(engine, PROMPTS, sampling(), seed=8, samples=4) != first


SMALL = {
    "vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
SOME = {
    "llama": {}, "gemma3_text": {}, "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 8},
    "qwen3_next": {"num_experts": 4, "moe_intermediate_size": 8, "layer_types": ["linear_attention", "full_attention"]},
    "deepseek_v3": {"first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8},
}  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", SOME)
def test_a_model_is_built_without_random_weights_and_all_else_as_usual(family, tied, monkeypatch):
    config = AutoConfig.for_model(family, **SMALL | SOME[family], tie_word_embeddings=tied)
    usual = AutoModelForCausalLM.from_config(config)
    monkeypatch.setattr(torch.Tensor, "normal_", lambda *_, **__: pytest.fail("a weight is drawn"))

    built = build_model(config, torch.float32)

    assert dict(built.named_buffers()).keys() == dict(usual.named_buffers()).keys()
    for name, buffer in usual.named_buffers():
        assert torch.equal(dict(built.named_buffers())[name], buffer), name
    head, embedding = built.get_output_embeddings(), built.get_input_embeddings()
    assert (head.weight is embedding.weight) == tied


def test_nothing_generates_without_weights(new_engine):
    with pytest.raises(EngineError, match="no weights yet"):
        generate(new_engine(), PROMPTS, sampling(), seed=0)


def test_latent_norms_have_the_epsilon_with_which_megatron_trains(new_engine, tmp_path):
    engine = new_engine(model={"path": str(write_tiny_model("deepseek_v3", tmp_path / "model", rms_norm_eps=1e-3))})
    norms = [module.variance_epsilon for module in engine._model.modules() if hasattr(module, "variance_epsilon")]
    assert set(norms) == {1e-3}
