"""What the attention module draws: dropout and learnt sinks, in the state of Megatron's tracker."""

from __future__ import annotations

import pytest
import torch

from anytron_megatron.portable_te import pytorch as te
from tests.backends.megatron.portable_te.attention_cases import (
    DIM,
    HEADS,
    KV_HEADS,
    Tracker,
    attend_flat,
    module,
    operands,
)


def test_dropout_draws_in_the_trackers_state_and_only_while_training(bound):
    tracker = Tracker()
    attention = module(attention_dropout=0.5, get_rng_state_tracker=tracker)
    inputs = operands(1, 32)
    first, second = (attention(*inputs, qkv_format="bshd") for _ in range(2))
    assert not torch.equal(first, second)
    assert tracker.forks == 2
    attention.eval()
    assert torch.equal(attention(*inputs, qkv_format="bshd"), module()(*inputs, qkv_format="bshd"))
    assert tracker.forks == 2


@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one", "learnable"])
@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_dropout_drops_weights_and_scales_the_rest(bound, layout, softmax_type):
    lengths, starts = [7, 9], [0, 9, 18]
    query, key, _ = operands(18)
    value = torch.eye(9).repeat(2, 1)[:, None].expand(-1, KV_HEADS, -1)  # the output is the weights
    whole, dropped = (
        te.DotProductAttention(HEADS, (DIM, 9), KV_HEADS, p, attn_mask_type="padding_causal", softmax_type=softmax_type)
        for p in (0.0, 0.25)
    )
    dropped.load_state_dict(whole.state_dict())
    torch.manual_seed(0)
    weights = attend_flat(whole, (query, key, value), layout, lengths, starts)
    scaled = attend_flat(dropped, (query, key, value), layout, lengths, starts) * 0.75
    kept = scaled != 0
    torch.testing.assert_close(scaled[kept], weights[kept])
    assert 0.65 < kept.sum() / (weights != 0).sum() < 0.85


def test_learnt_sinks_are_parts_of_a_split_tensor_drawn_in_the_trackers_state(bound):
    tracker = Tracker()
    attention = module(softmax_type="learnable", tp_size=2, get_rng_state_tracker=tracker)
    assert attention.softmax_offset.shape == (HEADS // 2,)
    assert attention.softmax_offset.ne(0).all()
    assert tracker.forks == 1
    # Megatron's gradient norm and its distributed checkpoints read these.
    assert attention.softmax_offset.tensor_model_parallel is True
    assert attention.softmax_offset.partition_dim == 0
    assert list(attention.state_dict()) == ["softmax_offset"]
    assert list(module(softmax_type="off-by-one").state_dict()) == []
    assert module().softmax_offset is None
