"""From responses to a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from anytron.algorithms.registered import with_advantages
from anytron.config.algorithm import AlgorithmSection
from anytron.config.imports import resolve
from anytron.run.trainer.experience import assemble, make_samples
from anytron.task.data.images import ImagePatches
from anytron.task.data.pretrained import TOKENIZER
from anytron.task.data.prompts import TokenizedPrompt
from anytron.workers.engines.rollout_engine import Response
from anytron.workers.executor.channel import Result, decode, encode


@pytest.fixture
def tokenizer(new_run):
    return resolve(new_run().config.model.tokenizer, TOKENIZER)()


PROMPTS = [
    TokenizedPrompt("a", "31>", (3, 1, 10), {"answer": "13"}),
    TokenizedPrompt("b", "5>", (5, 10), {"answer": "5"}),
]
RESPONSES = [
    [Response((1, 3, 11), (-0.1, -0.2, -0.3), "stop", (0,) * 3), Response((), (), "stop", ())],
    [Response((5,), (-0.4,), "length", (0,)), Response((7, 7), (-0.5, -0.6), "length", (0, 0))],
]


def test_samples_carry_text_without_special_tokens(tokenizer):
    samples = make_samples(PROMPTS, RESPONSES, tokenizer)
    assert [(sample.prompt_id, sample.response_text) for sample in samples] == [
        ("a", "13"),
        ("a", ""),
        ("b", "5"),
        ("b", "77"),
    ]
    assert samples[0].response_tokens == (1, 3, 11)
    assert [sample.finished for sample in samples] == [True, True, False, False]
    assert samples[3].data == {"answer": "5"}


def test_a_batch_is_the_samples_side_by_side(tokenizer):
    batch = assemble(make_samples(PROMPTS, RESPONSES, tokenizer), temperature=0.5)
    assert batch.lengths.tolist() == [6, 3, 3, 4]
    assert batch.tokens.tolist() == [3, 1, 10, 1, 3, 11, 3, 1, 10, 5, 10, 5, 5, 10, 7, 7]
    assert batch.response_mask.int().tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1]
    expected = [0, 0, 0, -0.1, -0.2, -0.3, 0, 0, 0, 0, 0, -0.4, 0, 0, -0.5, -0.6]
    torch.testing.assert_close(batch.rollout_log_probs, torch.tensor(expected))
    assert batch.temperature == 0.5


def test_routing_gets_a_row_for_the_token_that_ends_a_sequence(tokenizer):
    def routed(prompt, response, first):
        rows = len(prompt.tokens) + len(response.tokens) - 1
        numbers = torch.arange(first, first + rows * 4, dtype=torch.uint8)
        return replace(response, routing=numbers.view(rows, 2, 2))

    groups = [
        [routed(prompt, response, 1 + 50 * place) for place, response in enumerate(group)]
        for prompt, group in zip(PROMPTS, RESPONSES, strict=True)
    ]
    batch = assemble(make_samples(PROMPTS, groups, tokenizer), temperature=1.0)
    assert batch.routing.shape == (16, 2, 2)
    assert batch.routing.dtype is torch.uint8
    starts = [0, 6, 9, 12]
    for start, length, response in zip(starts, batch.lengths.tolist(), [*groups[0], *groups[1]], strict=True):
        assert torch.equal(batch.routing[start : start + length - 1], response.routing)


def test_where_routing_ends_early_or_is_missing_tokens_go_to_the_first_experts(tokenizer):
    """An environment has failed there, before the model read on, or before it read anything."""
    told = torch.full((4, 2, 3), 9, dtype=torch.uint8)
    first, second = RESPONSES[0][0], RESPONSES[1][0]
    groups = [[replace(first, routing=told)], [second]]
    batch = assemble(make_samples(PROMPTS, groups, tokenizer), temperature=1.0)
    assert batch.routing.dtype is torch.uint8
    assert torch.equal(batch.routing[:4], told)
    assert batch.routing[4:].tolist() == [[[0, 1, 2]] * 2] * (2 + 3)


def test_a_batch_of_empty_responses_can_be_made(tokenizer):
    empty = [[Response((), (), "stop", ())]] * 2
    batch = assemble(make_samples(PROMPTS, empty, tokenizer), temperature=1.0)
    assert batch.lengths.tolist() == [3, 2]
    assert not batch.response_mask.any()


def test_advantages_reach_response_tokens_only(tokenizer):
    batch = assemble(make_samples(PROMPTS, RESPONSES, tokenizer), 1.0, torch.tensor([0, 0, 1, 1]))
    algorithm = AlgorithmSection(normalize_std=False)
    batch = with_advantages(batch, torch.tensor([1.0, 0.0, 0.2, 0.2]), algorithm)
    assert batch.advantages.tolist() == [0, 0, 0, 0.5, 0.5, 0.5] + [0] * 10


@pytest.mark.parametrize("normalize_std", [False, True])
def test_with_values_each_token_is_compared_with_what_was_expected(tokenizer, normalize_std):
    batch = assemble(make_samples(PROMPTS, RESPONSES, tokenizer), temperature=1.0)
    batch = replace(batch, values=torch.full((16,), 0.25))
    algorithm = AlgorithmSection(advantage="gae", normalize_std=normalize_std)
    batch = with_advantages(batch, torch.tensor([1.0, 0.0, 0.2, 0.2]), algorithm)
    torch.testing.assert_close(batch.returns, torch.tensor([0, 0, 0, 1, 1, 1] + [0] * 5 + [0.2, 0, 0, 0.2, 0.2]))
    advantages = batch.advantages[batch.response_mask]
    if normalize_std:
        assert advantages.mean().item() == pytest.approx(0, abs=1e-6)
        assert advantages.var().item() == pytest.approx(1, rel=1e-5)
        assert not batch.advantages[~batch.response_mask].any()
    else:
        torch.testing.assert_close(batch.advantages + 0.25 * batch.response_mask, batch.returns)


def test_the_samples_of_a_prompt_share_its_images_also_on_their_way_to_a_worker(tokenizer):
    patches = ImagePatches(torch.randn(1000, 64), torch.tensor([[1, 25, 40]]))
    prompts = [replace(PROMPTS[0], patches=patches, images=("a.png",)), PROMPTS[1]]
    samples = make_samples(prompts, [group * 8 for group in RESPONSES], tokenizer)
    assert {sample.images for sample in samples[:16]} == {("a.png",)}
    batch = assemble(samples, temperature=1.0)
    assert batch.images == (patches,) * 16 + (None,) * 16

    halves = [batch.select(torch.arange(8)), batch.select(torch.arange(8, 20))]
    message = encode(Result(halves))
    assert len(message) < 1.1 * patches.pixel_values.nbytes
    first, second = decode(message).value
    assert len({id(received) for received in (*first.images, *second.images[:8])}) == 1
    assert torch.equal(second.images[0].pixel_values, patches.pixel_values)
    assert second.images[8:] == (None,) * 4

    assert assemble(samples[16:], temperature=1.0).images is None
