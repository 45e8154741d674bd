"""The laws of shared prompts: every token has its place, attention sees whole sequences, gradients add up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from anytron.kernels.oracles.attention import reference_attention
from anytron.sequences.layout import LayoutConstraints
from anytron.sequences.planning import plan_layout
from anytron.sequences.shared_prompts import (
    WORTHWHILE,
    Repeats,
    SharedPrompts,
    common_prompts,
    current_prompts,
    scope_of,
)

# Prompts of few different tokens, some of them the beginning of others, each with responses, some of them empty.
groups = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=6),
        st.lists(st.lists(st.integers(2, 4), max_size=3), min_size=1, max_size=5),
    ),
    min_size=1,
    max_size=4,
)


def micro_batch(drawn):
    """Lengths, tokens and response mask of sequences (prompt, response)."""
    sequences = [(prompt, response) for prompt, responses in drawn for response in responses]
    lengths = torch.tensor([len(prompt) + len(response) for prompt, response in sequences])
    tokens = torch.tensor([token for prompt, response in sequences for token in (*prompt, *response)])
    written = [flag for prompt, response in sequences for flag in (False,) * len(prompt) + (True,) * len(response)]
    return lengths, tokens, torch.tensor(written)


@given(drawn=groups)
def test_tokens_positions_and_labels_are_those_of_whole_sequences(drawn):
    lengths, tokens, written = micro_batch(drawn)
    pieces = common_prompts(lengths, tokens, written)
    if pieces is None:
        return
    assert len(pieces.tokens) == int(pieces.lengths.sum()) <= WORTHWHILE * len(tokens)
    assert torch.equal(tokens[pieces.tokens[pieces.places]], tokens)
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
    layout = plan_layout(pieces.lengths, tensor_parallel=4, constraints=LayoutConstraints(bucket=5))
    found = layout.unpack(pieces.position_ids(layout, 100))
    assert torch.equal(found[pieces.places], positions)
    # Each label stands at one position, which is that of no other sequence.
    labels = layout.next_tokens(tokens[pieces.tokens], ignored=~written[pieces.tokens])
    assert sorted(labels[labels >= 0].tolist()) == sorted(tokens[written].tolist())
    whole = plan_layout(lengths)
    expected = whole.unpack(whole.next_tokens(tokens, ignored=~written))
    assert torch.equal(layout.unpack(labels)[pieces.places], expected)


@given(drawn=groups, tensor_parallel=st.sampled_from([1, 4]))
def test_attention_of_pieces_is_that_of_whole_sequences(drawn, tensor_parallel):
    """Also its gradients: numbers of a prompt stand for those of all its samples."""
    lengths, tokens, written = micro_batch(drawn)
    pieces = common_prompts(lengths, tokens, written)
    if pieces is None:
        return
    layout = plan_layout(pieces.lengths, tensor_parallel=tensor_parallel)
    prompts = SharedPrompts.of(pieces, layout)
    generator = torch.Generator().manual_seed(0)
    distinct = torch.randn(3, len(pieces.tokens), 2, 4, dtype=torch.float64, generator=generator)
    whole = distinct[:, pieces.places].unbind()
    leaves = [operand.clone().requires_grad_() for operand in whole]
    expected = reference_attention(*leaves, lengths=lengths.tolist(), scale=0.5, causal=True)
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    gradients = torch.autograd.grad((expected * weights).sum(), leaves)

    slots = [layout.pack(operand)[0].requires_grad_() for operand in distinct.unbind()]
    query, key, value = slots[0], prompts.keys.take(slots[1]), prompts.keys.take(slots[2])
    outputs = torch.zeros_like(query)
    bounds = prompts.cu_seqlens_keys.tolist()
    starts = layout.cu_seqlens_padded.tolist()
    for piece, (length, start) in enumerate(zip(pieces.lengths.tolist(), pieces.starts.tolist(), strict=True)):
        rows, columns = slice(starts[piece], starts[piece] + length), slice(bounds[piece], bounds[piece + 1])
        visible = torch.arange(columns.stop - columns.start) <= start + torch.arange(length)[:, None]
        operands = (operand.transpose(0, 1) for operand in (query[rows], key[columns], value[columns]))
        attended = scaled_dot_product_attention(*operands, attn_mask=visible, scale=0.5)
        outputs = outputs.index_put((torch.arange(rows.start, rows.stop),), attended.transpose(0, 1))
    answers = prompts.answers.take(layout.unpack(outputs[None]))
    torch.testing.assert_close(answers, expected)
    found = torch.autograd.grad((answers * weights).sum(), slots)
    for one, other in zip(found, gradients, strict=True):
        summed = torch.zeros_like(distinct[0]).index_add_(0, pieces.places, other)
        torch.testing.assert_close(layout.unpack(one[None]), summed)


def test_the_last_token_of_a_prompt_is_not_shared():
    """The samples of a prompt differ in the label at its position."""
    pieces = common_prompts(*micro_batch([([0, 1, 0], [[2], [3, 4]])]))
    assert pieces.lengths.tolist() == [2, 2, 3]
    assert pieces.starts.tolist() == [0, 2, 2]
    assert pieces.prefixes == 1


@pytest.mark.parametrize(
    "drawn",
    [
        [([0, 1, 0], [[2]]), ([1, 1, 0], [[3]])],  # nothing in common
        [([0], [[2], [3]])],  # a prompt of one token has no prefix
        [([0, 1], [[2] * 20, [3] * 20])],  # two of 44 tokens
    ],
)
def test_what_saves_little_is_not_shared(drawn):
    assert common_prompts(*micro_batch(drawn)) is None


@given(source=st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_the_gradient_of_a_row_is_the_sum_of_its_copies(source):
    rows = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    repeats = Repeats.of(torch.tensor(source), 6)
    taken = repeats.take(rows)
    assert torch.equal(taken, rows[source])
    weights = torch.randn(taken.shape, dtype=torch.float64)
    (found,) = torch.autograd.grad((taken * weights).sum(), rows)
    torch.testing.assert_close(found, torch.zeros_like(found).index_add_(0, torch.tensor(source), weights))


def test_prompts_belong_to_the_scope_of_their_micro_batch():
    pieces = common_prompts(*micro_batch([([0, 1, 0], [[2], [3, 4]])]))
    prompts = SharedPrompts.of(pieces, plan_layout(pieces.lengths))
    assert current_prompts() is None
    with scope_of(prompts)():
        assert current_prompts() is prompts
    assert current_prompts() is None
