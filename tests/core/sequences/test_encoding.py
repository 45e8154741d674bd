"""A batch has the same bits after pickling, and crosses to a rank in few bytes."""

import dataclasses
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anytron.sequences import encoding
from anytron.sequences.batch import RaggedBatch
from anytron.workers.executor.channel import Call, decode, encode

FLOATS = (
    "rollout_log_probs", "old_log_probs", "reference_log_probs", "teacher_log_probs", "token_rewards", "advantages",
    "values", "returns", "loss_weights", "token_shares",
)  # fmt: skip
UNUSUAL = [0.0, -0.0, 1.5, float("nan"), float("inf"), 1e-45]


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
    size = sum(lengths)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    mask = torch.rand(size, generator=generator) < draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    largest = draw(st.sampled_from([9, 2**31 - 1, 2**31, 2**40]))
    of_tokens = torch.tensor(UNUSUAL)[torch.randint(len(UNUSUAL), (size,), generator=generator)]
    of_sequences = of_tokens[: len(lengths)].repeat_interleave(torch.tensor(lengths))
    forms = [None, of_tokens, of_tokens.where(mask, 0.0), of_sequences.where(mask, 0.0), of_sequences]
    fields = {name: draw(st.sampled_from(forms)) for name in FLOATS}
    return RaggedBatch(
        lengths=torch.tensor(lengths),
        tokens=torch.randint(largest + 1, (size,), generator=generator),
        response_mask=mask,
        temperature=0.7,
        groups=draw(st.sampled_from([None, torch.arange(len(lengths))])),
        routing=draw(st.sampled_from([None, torch.arange(size * 2, dtype=torch.int16).view(size, 1, 2)])),
        is_filler=draw(st.booleans()),
        **fields,
    )


def bits(batch):
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return {
        name: (value.dtype, value.shape, value.numpy().tobytes()) if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }


@settings(max_examples=200, deadline=None)
@given(batches())
def test_pickling_keeps_every_bit(batch):
    assert bits(pickle.loads(pickle.dumps(batch))) == bits(batch)
    assert bits(decode(encode(Call("score", (batch,), {}))).args[0]) == bits(batch)


def step(sequences=64, prompt=100, response=400):
    """A step of GRPO: rollout log-probs are of tokens, advantages and weights of sequences."""
    lengths = torch.full((sequences,), prompt + response)
    mask = torch.cat([torch.arange(prompt + response) >= prompt] * sequences)
    log_probs = (-torch.rand(len(mask))).where(mask, 0.0)
    of_sequences = torch.randn(sequences).repeat_interleave(lengths).where(mask, 0.0)
    fields = {"advantages": of_sequences, "loss_weights": of_sequences / 7, "token_shares": mask / mask.sum()}
    tokens = torch.randint(150_000, (len(mask),))
    return RaggedBatch(lengths, tokens, mask, rollout_log_probs=log_probs, old_log_probs=2 * log_probs, **fields)


@settings(deadline=None)
@given(batches())
def test_a_rank_gets_int64_tokens_also_of_int32(batch):
    narrow = dataclasses.replace(batch, tokens=batch.tokens.int())
    wide = dataclasses.replace(batch, tokens=narrow.tokens.long())
    assert bits(pickle.loads(pickle.dumps(narrow))) == bits(wide)


def bytes_of_a_token(batch):
    return len(encode(Call("update", ([batch],), {}))) / batch.num_tokens


def test_a_token_takes_few_bytes():
    batch = step(prompt=1)

    assert bytes_of_a_token(batch) < 12.3  # of a response; one of a prompt takes 4.1
    assert bytes_of_a_token(step()) < 11
    assert bytes_of_a_token(batch.for_scoring()) < 4.3


def test_a_forward_pass_gets_no_field_of_a_loss():
    batch = step()

    given = batch.for_scoring()

    assert {name for name, value in bits(batch).items() if value is not None and bits(given)[name] is None} == {
        "rollout_log_probs", "old_log_probs", "advantages", "loss_weights", "token_shares"
    }  # fmt: skip
    for name in ("lengths", "tokens", "response_mask", "temperature"):
        assert bits(given)[name] == bits(batch)[name]


@pytest.mark.parametrize("name", ["Ids", "Bits", "InResponses", "OfSequences"])
def test_each_form_is_used(name):
    forms = {type(value).__name__ for value in encoding.encode(step()._fields()).values()}
    assert name in forms
