"""What every loss has to keep to, and the value loss against a naive loop; formulas are in test_formulas.py."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anytron.algorithms.advantages import broadcast_to_tokens
from anytron.algorithms.aggregation import loss_weights, token_share
from anytron.algorithms.losses import ValueLoss
from anytron.algorithms.policy_loss import PolicyLoss
from anytron.algorithms.registered import LOSSES
from anytron.base.errors import DataError
from anytron.base.metric import joined
from anytron.config.algorithm import AlgorithmSection
from anytron.run.trainer.updates import UpdatePlan
from anytron.sequences.batch import RaggedBatch, TokenOutputs


def make_batch(prompts, responses, aggregation="token-mean", seed=0, **changes):
    """Sequences with random log-probs; returns the batch, current log-probs and entropies (float64)."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(prompts) + torch.tensor(responses)
    mask = torch.cat(
        [torch.arange(prompt + response) >= prompt for prompt, response in zip(prompts, responses, strict=True)]
    )
    total, counts = mask.numel(), torch.tensor(responses)

    def noise(scale):
        return scale * torch.randn(total, generator=generator, dtype=torch.float64)

    current = -2 + noise(0.5)
    batch = RaggedBatch(
        lengths=lengths,
        tokens=torch.randint(0, 9, (total,), generator=generator),
        response_mask=mask,
        rollout_log_probs=torch.where(mask, current.detach() + noise(0.01), 0.0),
        old_log_probs=torch.where(mask, current.detach() + noise(0.3), 0.0),
        reference_log_probs=current.detach() + noise(0.3),
        advantages=torch.repeat_interleave(torch.randn(len(prompts), generator=generator).double(), lengths) * mask,
        loss_weights=broadcast_to_tokens(loss_weights(counts, aggregation), lengths, mask).double(),
        token_shares=(mask * token_share(counts)).double(),
    )
    return replace(batch, **changes), current.requires_grad_(), (1 + noise(0.1).abs()).requires_grad_()


def test_clipping_stops_the_gradient_where_the_ratio_has_moved_enough():
    batch, _, entropy = make_batch([1], [4])
    ratios = torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5], dtype=torch.float64)
    log_probs = ratios.log().requires_grad_()
    batch = replace(
        batch,
        old_log_probs=torch.zeros(5, dtype=torch.float64),
        advantages=torch.tensor([0.0, 1.0, -1.0, 1.0, -1.0], dtype=torch.float64),
    )
    outputs = PolicyLoss(AlgorithmSection())(TokenOutputs(log_probs, entropy), batch)
    outputs.loss.backward()
    assert (log_probs.grad != 0).tolist() == [False, False, True, True, False]
    assert outputs.metrics["policy/clip_fraction"].item() == 0.5


def test_without_old_log_probs_the_gradient_is_the_policy_gradient():
    batch, log_probs, entropy = make_batch([2, 2], [3, 4], old_log_probs=None)
    outputs = PolicyLoss(AlgorithmSection())(TokenOutputs(log_probs, entropy), batch)
    outputs.loss.backward()
    torch.testing.assert_close(log_probs.grad, -batch.loss_weights * batch.advantages)
    assert outputs.metrics["policy/ratio_mean"].item() == pytest.approx(1)


AGGREGATIONS = ["token-mean", "sequence-mean", "token-sum", "length-constant"]
CORRECTIONS = [
    {},
    *(
        {"importance_correction": how, "importance_level": level}
        for how in ("truncated", "masked")
        for level in ("token", "sequence")
    ),
]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 7)), min_size=4, max_size=12).filter(
        lambda pairs: any(response for _, response in pairs)
    ),
    st.integers(1, 30),
    st.integers(1, 4),
    st.sampled_from(AGGREGATIONS),
    st.sampled_from(sorted(LOSSES)),
    st.sampled_from(CORRECTIONS),
)
def test_parts_add_up_however_the_batch_is_split(pairs, max_tokens, copies, aggregation, name, correction):
    prompts, responses = zip(*pairs, strict=True)
    batch, log_probs, entropy = make_batch(prompts, responses, aggregation)
    loss = PolicyLoss(AlgorithmSection(loss=name, kl_coefficient=0.1, entropy_coefficient=0.01, **correction))
    whole = loss(TokenOutputs(log_probs, entropy), batch)
    (expected,) = torch.autograd.grad(whole.loss, log_probs)

    plan = UpdatePlan(epochs=1, count=1, aggregation=aggregation, max_tokens=max_tokens)
    # The model's outputs travel with the batch through the same division.
    index = torch.arange(batch.num_tokens)
    shares = plan.micro_batches(replace(batch, tokens=index), copies)
    parts = [
        loss(TokenOutputs(log_probs[part.batch.tokens], entropy[part.batch.tokens]), part.batch)
        for share in shares
        for part in share
    ]
    total = sum(part.loss for part in parts)
    (gradient,) = torch.autograd.grad(total, log_probs)
    torch.testing.assert_close(gradient, expected)
    for metric, value in whole.metrics.items():
        found = joined(metric, [part.metrics[metric].item() for part in parts])
        assert found == pytest.approx(value.item(), rel=1e-9, abs=1e-12), metric


def test_what_stands_outside_of_responses_has_no_influence():
    batch, log_probs, entropy = make_batch([3, 2], [2, 2])
    outside = ~batch.response_mask
    wild = log_probs.detach().masked_fill(outside, 1e4).requires_grad_()
    outputs = PolicyLoss(AlgorithmSection(kl_coefficient=0.1))(TokenOutputs(wild, entropy), batch)
    outputs.loss.backward()
    assert torch.isfinite(outputs.loss)
    assert torch.all(wild.grad[outside] == 0)
    torch.testing.assert_close(
        outputs.loss, PolicyLoss(AlgorithmSection(kl_coefficient=0.1))(TokenOutputs(log_probs, entropy), batch).loss
    )


def test_the_difference_from_the_rollout_is_averaged_over_response_tokens():
    batch, log_probs, entropy = make_batch([2, 1], [1, 3], "sequence-mean")
    expected = (batch.old_log_probs - batch.rollout_log_probs)[batch.response_mask].abs().mean()
    found = PolicyLoss(AlgorithmSection())(TokenOutputs(log_probs, entropy), batch).metrics["rollout/log_prob_abs_diff"]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("field", ["advantages", "loss_weights", "token_shares", "reference_log_probs"])
def test_a_missing_field_is_named(field):
    batch, log_probs, entropy = make_batch([2], [2], **{field: None})
    with pytest.raises(DataError, match=f"field {field} is missing"):
        PolicyLoss(AlgorithmSection(kl_coefficient=0.1))(TokenOutputs(log_probs, entropy), batch)


def test_the_loss_travels_between_processes():
    loss = PolicyLoss(AlgorithmSection(clip_high=0.28, kl_coefficient=0.1))
    assert pickle.loads(pickle.dumps(loss)) == loss


def with_values(batch, seed=1):
    """The batch with old values and returns, and current values for it."""
    generator = torch.Generator().manual_seed(seed)
    old, returns, current = torch.randn(3, batch.num_tokens, generator=generator, dtype=torch.float64)
    return replace(batch, values=old, returns=returns), current.requires_grad_()


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_the_value_loss_is_half_the_larger_squared_error(clip):
    batch, _, _ = make_batch([3, 1, 2, 4], [5, 9, 0, 1])
    batch, values = with_values(batch)
    outputs = ValueLoss(clip)(TokenOutputs(values=values), batch)
    errors, clipped = [], 0
    for token in batch.response_mask.nonzero().flatten().tolist():
        value, old, target = (series[token].item() for series in (values, batch.values, batch.returns))
        error = (value - target) ** 2
        held = (min(max(value, old - clip), old + clip) - target) ** 2 if clip else error
        clipped += held > error
        errors.append(0.5 * max(error, held))
    assert outputs.loss.item() == pytest.approx(sum(errors) / len(errors), rel=1e-6)
    assert outputs.metrics["critic/clip_fraction"].item() == pytest.approx(clipped / len(errors))
    assert (clipped > 0) == (clip > 0)


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_the_gradient_of_the_value_loss_is_that_of_the_naive_loop(clip):
    batch, _, _ = make_batch([3, 1, 2, 4], [5, 9, 0, 1])
    batch, values = with_values(batch)
    errors = []
    for token in batch.response_mask.nonzero().flatten().tolist():
        value, old, target = values[token], batch.values[token].item(), batch.returns[token].item()
        moved = value.item() - old
        held = value if clip == 0.0 or abs(moved) <= clip else old + math.copysign(clip, moved)
        errors.append(0.5 * max((value - target) ** 2, (held - target) ** 2))
    (expected,) = torch.autograd.grad(sum(errors) / len(errors), values)
    (found,) = torch.autograd.grad(ValueLoss(clip)(TokenOutputs(values=values), batch).loss, values)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
    still = int(((expected == 0) & batch.response_mask).sum())
    assert (still > 0) == (clip > 0), "some tokens are held, and without a limit none is"


def test_a_value_that_has_come_nearer_by_the_limit_moves_no_further():
    batch, _, _ = make_batch([1], [4])
    series = torch.tensor([0.0, 0.6, 0.4, -0.6, 1.6], dtype=torch.float64)
    batch = replace(batch, values=torch.zeros(5).double(), returns=torch.ones(5).double())
    values = series.requires_grad_()
    ValueLoss(0.5)(TokenOutputs(values=values), batch).loss.backward()
    # Past the limit and near the return, within it, past it on the wrong side, and far beyond the return.
    assert (values.grad != 0).tolist() == [False, False, True, True, True]


def test_parts_of_the_value_loss_add_up():
    batch, _, _ = make_batch([3, 1, 2, 4], [5, 9, 0, 1], "sequence-mean")
    batch, values = with_values(batch)
    whole = ValueLoss()(TokenOutputs(values=values), batch)
    plan = UpdatePlan(epochs=1, count=1, aggregation="sequence-mean", max_tokens=7)
    shares = plan.micro_batches(replace(batch, tokens=torch.arange(batch.num_tokens)), 2)
    parts = [
        ValueLoss()(TokenOutputs(values=values[part.batch.tokens]), part.batch) for share in shares for part in share
    ]
    torch.testing.assert_close(sum(part.loss for part in parts), whole.loss)
    for name, value in whole.metrics.items():
        torch.testing.assert_close(sum(part.metrics[name] for part in parts), value)


@pytest.mark.parametrize("field", ["values", "returns", "loss_weights", "token_shares"])
def test_a_field_that_the_value_loss_needs_is_named(field):
    batch, _, _ = make_batch([2], [2])
    batch, values = with_values(batch)
    with pytest.raises(DataError, match=rf"(?s)field {field} is missing.*ValueLoss"):
        ValueLoss()(TokenOutputs(values=values), replace(batch, **{field: None}))


def test_the_value_loss_travels_between_processes():
    assert pickle.loads(pickle.dumps(ValueLoss(0.1))) == ValueLoss(0.1)
