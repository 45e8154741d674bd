"""``npu_fusion_attention``: right by its definition, and strict about its documentation.

op-plugin's real C++ runs in front of the reference kernel.
"""

from __future__ import annotations

import pytest
import torch
import torch_npu
from anytron_ascend_simulator import aclnn

from anytron.kernels.oracles.attention import reference_attention

B, S, H, G, D = 2, 6, 4, 2, 8
SCALE = 0.3


def operands(value_size=D, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((H, D), (G, D), (G, value_size))
    return [torch.randn(B, S, *size, generator=generator) for size in sizes]


def arrange(tensor, layout):
    return {
        "BSND": tensor,
        "BNSD": tensor.transpose(1, 2),
        "BSH": tensor.flatten(2),
        "SBH": tensor.flatten(2).transpose(0, 1),
        "TND": tensor.flatten(0, 1),
    }[layout]


def restore(output, layout):
    """The output as ``[B * S, H, D]``."""
    if layout in ("BSH", "SBH"):
        output = (output if layout == "BSH" else output.transpose(0, 1)).unflatten(2, (H, -1))
    return (output.transpose(1, 2) if layout == "BNSD" else output).reshape(B * S, H, -1)


def triangle():
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu()


def expected(inputs, *, causal=False, window=None):
    flat = [tensor.double().flatten(0, 1).requires_grad_() for tensor in inputs]
    output = reference_attention(*flat, lengths=[S] * B, scale=SCALE, causal=causal, window=window)
    return output, torch.autograd.grad(output.square().sum(), flat)


MODES = {
    "everything": ({}, {}),
    "full mask": ({"sparse_mode": 1, "mask": "causal"}, {"causal": True}),
    "default mask": ({"sparse_mode": 0, "mask": "causal"}, {"causal": True}),
    "default mask with its window": ({"sparse_mode": 0, "mask": "causal", "next_tockens": 0}, {"causal": True}),
    "left-up causal": ({"sparse_mode": 2, "mask": "compressed"}, {"causal": True}),
    "right-down causal": ({"sparse_mode": 3, "mask": "compressed"}, {"causal": True}),
    "band": (
        {"sparse_mode": 4, "mask": "compressed", "pre_tockens": 2, "next_tockens": 1},
        {"window": (2, 1)},
    ),
}


@pytest.mark.parametrize("layout", ["BSND", "BNSD", "BSH", "SBH", "TND"])
@pytest.mark.parametrize("mode", MODES)
def test_forward_and_backward_are_the_definition_in_every_layout(layout, mode):
    settings, meaning = MODES[mode]
    settings = dict(settings)
    kind = settings.pop("mask", None)
    masks = {"causal": torch.ones(S, S, dtype=torch.bool).triu(1).npu(), "compressed": triangle(), None: None}
    if layout == "TND":
        settings |= {"actual_seq_qlen": [S, 2 * S], "actual_seq_kvlen": [S, 2 * S]}
    inputs = operands()
    leaves = [tensor.npu().requires_grad_() for tensor in inputs]
    output = torch_npu.npu_fusion_attention(
        *(arrange(leaf, layout) for leaf in leaves), H, layout, atten_mask=masks[kind], scale=SCALE, **settings
    )[0]
    gradients = torch.autograd.grad(output.square().sum(), leaves)
    value, wanted = expected(inputs, **meaning)
    torch.testing.assert_close(restore(output.detach().cpu(), layout), value.float(), atol=2e-6, rtol=2e-5)
    for gradient, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient.cpu().flatten(0, 1), want.float(), atol=1e-5, rtol=1e-4)


def attend(*, layout="BSND", inputs=None, **settings):
    tensors = [arrange(tensor, layout).npu() for tensor in inputs or operands()]
    return torch_npu.npu_fusion_attention(*tensors, settings.pop("heads", H), layout, scale=SCALE, **settings)[0]


FULL = torch.zeros(S, S, dtype=torch.bool)
VIOLATIONS = {
    "a float mask": ({"atten_mask": FULL.float().npu, "sparse_mode": 1}, "bool or uint8"),
    "a full mask with a compressed mode": ({"atten_mask": FULL.npu, "sparse_mode": 2}, "compressed 2048x2048"),
    "a compressed mask of the other polarity": (
        {"atten_mask": lambda: ~triangle(), "sparse_mode": 3},
        "upper triangle",
    ),
    "a mask of another size": ({"atten_mask": FULL[:3, :3].npu, "sparse_mode": 1}, "6 queries and 6 keys"),
    "a mask of another batch": (
        {"atten_mask": FULL.expand(3, 1, S, S).npu, "sparse_mode": 1},
        r"\[1, 1, Sq, Skv\]",
    ),
    "a window that contradicts the mask": (
        {"atten_mask": FULL.npu, "sparse_mode": 0, "next_tockens": 0},
        "outside of the window",
    ),
    "sinks of another dtype": ({"sink": torch.zeros(H, dtype=torch.float16).npu}, "sink is torch.float16"),
    "a sink too few": ({"sink": torch.zeros(H - 1).npu}, r"\[head_num\] = \(4,\)"),
    "values wider than keys": ({"inputs": lambda: operands(2 * D)}, "value heads|Dv"),
    "a number of heads that is not the query's": ({"heads": 2}, "head_num|head"),
    "lengths with a leading zero": (
        {"layout": "TND", "actual_seq_qlen": [0, S, 2 * S], "actual_seq_kvlen": [0, S, 2 * S]},
        "leading 0",
    ),
    "lengths beyond the tokens": (
        {"layout": "TND", "actual_seq_qlen": [S, 3 * S], "actual_seq_kvlen": [S, 3 * S]},
        "there are 12 tokens",
    ),
    "lengths that descend": (
        {"layout": "TND", "actual_seq_qlen": [2 * S, S], "actual_seq_kvlen": [2 * S, S]},
        "not ascending",
    ),
    "a fully masked row in TND": (
        {
            "layout": "TND",
            "actual_seq_qlen": [S, 2 * S],
            "actual_seq_kvlen": [S, 2 * S],
            "atten_mask": (~FULL).npu,
            "sparse_mode": 1,
        },
        "fully masked",
    ),
    "a mode for packed sequences in rows": ({"atten_mask": triangle, "sparse_mode": 7}, "TND|sparse"),
}


@pytest.mark.parametrize("violation", VIOLATIONS)
def test_what_the_documentation_forbids_is_refused(violation):
    settings, text = VIOLATIONS[violation]
    given = {name: value() if callable(value) else value for name, value in settings.items()}
    with pytest.raises((RuntimeError, ValueError), match=text):
        attend(**given)


def test_a_row_without_keys_sees_everything_unless_invalid_rows_are_asked_for():
    mask = FULL.clone()
    mask[2] = True
    inputs = operands()
    mean = inputs[2].mean(1).repeat_interleave(H // G, 1)
    plain = attend(inputs=inputs, atten_mask=mask.npu(), sparse_mode=1)
    torch.testing.assert_close(plain[:, 2].cpu(), mean, atol=1e-6, rtol=1e-5)
    careful = attend(inputs=inputs, atten_mask=mask.npu(), sparse_mode=1, inner_precise=2)
    assert careful[:, 2].abs().max().item() == 0


def test_the_gradient_uses_the_given_statistics_and_output():
    # Ring attention merges the outputs of several calls and hands the merged statistics to each gradient.
    q, k, v = (tensor.npu() for tensor in operands())
    whole = torch_npu.npu_fusion_attention(q, k, v, H, "BSND", scale=SCALE)
    cotangent = torch.ones_like(whole[0])
    halves = [slice(0, S // 2), slice(S // 2, S)]
    grads = [
        torch_npu.npu_fusion_attention_grad(
            q, k[:, half], v[:, half], cotangent, H, "BSND", softmax_max=whole[1], softmax_sum=whole[2],
            attention_in=whole[0], scale_value=SCALE,
        )
        for half in halves
    ]  # fmt: skip
    once = torch_npu.npu_fusion_attention_grad(
        q, k, v, cotangent, H, "BSND", softmax_max=whole[1], softmax_sum=whole[2], attention_in=whole[0],
        scale_value=SCALE,
    )  # fmt: skip
    torch.testing.assert_close((grads[0][0] + grads[1][0]).cpu(), once[0].cpu(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(torch.cat([grads[0][1], grads[1][1]], 1).cpu(), once[1].cpu(), atol=1e-6, rtol=1e-5)


def test_packed_statistics_are_written_heads_first_sequence_by_sequence():
    # MindSpeed's ring attention reads them so (mindspeed/core/context_parallel/utils.py, flatten_softmax).
    inputs = operands()
    rows = torch_npu.npu_fusion_attention(*(arrange(tensor, "BNSD").npu() for tensor in inputs), H, "BNSD", scale=SCALE)
    ends = [S, 2 * S]
    packed = torch_npu.npu_fusion_attention(
        *(arrange(tensor, "TND").npu() for tensor in inputs), H, "TND", scale=SCALE,
        actual_seq_qlen=ends, actual_seq_kvlen=ends,
    )  # fmt: skip
    for statistic, wanted in zip(packed[1:3], rows[1:3], strict=True):
        assert statistic.shape == (B * S, H, 8)
        torch.testing.assert_close(statistic.cpu().view(B, H, S, 8), wanted.cpu(), atol=1e-6, rtol=1e-5)


def test_the_operator_is_the_simulators():
    before = aclnn.CALLS["aclnnFlashAttentionScore"]
    attend()
    assert aclnn.CALLS["aclnnFlashAttentionScore"] == before + 1


SINKS = torch.tensor([-1.0, 0.0, 0.5, 2.0])


@pytest.mark.parametrize("layout", ["BSND", "BNSD", "BSH", "SBH", "TND"])
@pytest.mark.parametrize("mode", MODES)
def test_a_sink_joins_the_denominator_in_every_layout(layout, mode):
    settings, meaning = MODES[mode]
    settings = dict(settings)
    kind = settings.pop("mask", None)
    if kind is not None:
        settings["atten_mask"] = (
            triangle() if kind == "compressed" else torch.ones(S, S, dtype=torch.bool).triu(1).npu()
        )
    if layout == "TND":
        settings |= {"actual_seq_qlen": [S, 2 * S], "actual_seq_kvlen": [S, 2 * S]}
    rounded = [tensor.half() for tensor in operands()]
    leaves = [*(tensor.npu().requires_grad_() for tensor in rounded), SINKS.npu().requires_grad_()]
    output = torch_npu.npu_fusion_attention(
        *(arrange(leaf, layout) for leaf in leaves[:3]), H, layout, scale=SCALE, sink=leaves[3], **settings
    )[0]
    gradients = torch.autograd.grad(output.float().square().sum(), leaves)
    wide = [*(tensor.double().flatten(0, 1).requires_grad_() for tensor in rounded), SINKS.double().requires_grad_()]
    value = reference_attention(*wide[:3], lengths=[S] * B, scale=SCALE, sinks=wide[3], **{"causal": False, **meaning})
    wanted = torch.autograd.grad(value.square().sum(), wide)
    torch.testing.assert_close(restore(output.detach().cpu(), layout).double(), value.detach(), atol=2e-3, rtol=2e-3)
    assert gradients[3].dtype is torch.float32
    for gradient, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient.cpu().double().reshape(want.shape), want, atol=6e-3, rtol=6e-3)


@pytest.mark.parametrize("layout", ["BSND", "TND"])
def test_a_sink_in_float32_has_values_and_no_gradient(layout):
    inputs = operands()
    settings = {"actual_seq_qlen": [S, 2 * S], "actual_seq_kvlen": [S, 2 * S]} if layout == "TND" else {}
    leaves = [arrange(tensor, layout).npu().requires_grad_() for tensor in inputs]
    output = torch_npu.npu_fusion_attention(*leaves, H, layout, scale=SCALE, sink=SINKS.npu(), **settings)[0]
    flat = [tensor.double().flatten(0, 1) for tensor in inputs]
    value = reference_attention(*flat, lengths=[S] * B, scale=SCALE, causal=False, sinks=SINKS.double())
    torch.testing.assert_close(restore(output.detach().cpu(), layout), value.float(), atol=2e-6, rtol=2e-5)
    with pytest.raises(RuntimeError, match="gradient with sinks does not support float32"):
        output.sum().backward()


def test_packed_values_smaller_than_queries_have_no_gradient_with_sinks():
    inputs = [arrange(tensor.half(), "TND").npu().requires_grad_() for tensor in operands(value_size=D // 2)]
    ends = {"actual_seq_qlen": [S, 2 * S], "actual_seq_kvlen": [S, 2 * S]}
    output = torch_npu.npu_fusion_attention(*inputs, H, "TND", scale=SCALE, sink=SINKS.npu(), **ends)[0]
    with pytest.raises(RuntimeError, match="as large as heads of queries"):
        output.sum().backward()


KEPT = 0.6


@pytest.mark.parametrize("layout", ["BSND", "BNSD", "TND"])
def test_dropout_leaves_the_same_weights_in_both_directions(layout):
    lengths = [S - 2, S + 2] if layout == "TND" else [S] * B
    ends = [lengths[0], sum(lengths)]
    settings = {"actual_seq_qlen": ends, "actual_seq_kvlen": ends} if layout == "TND" else {}
    queries, keys, values = (tensor.repeat_interleave(H // tensor.size(2), 2) for tensor in operands())

    def weigh(*tensors):
        return torch_npu.npu_fusion_attention(*tensors, H, layout, scale=SCALE, keep_prob=KEPT, **settings)[0]

    # Values that are unit vectors give the weights themselves: none is 0 but those that were dropped.
    rows = [row for length in lengths for row in range(length)]
    unit = torch.eye(D)[rows].view(B, S, 1, D).expand(B, S, H, D)
    state = torch.npu.get_rng_state()
    weights = restore(weigh(*(arrange(one, layout).npu() for one in (queries, keys, unit))).cpu(), layout)
    torch.npu.set_rng_state(state)
    leaves = [arrange(one, layout).npu().requires_grad_() for one in (queries, keys, values)]
    output = weigh(*leaves)
    gradients = torch.autograd.grad(output.square().sum(), leaves)

    wide = [one.double().flatten(0, 1).requires_grad_() for one in (queries, keys, values)]
    expected, start = [], 0
    for length in lengths:
        part = slice(start, start + length)
        start += length
        scores = torch.einsum("qhd,khd->hqk", wide[0][part], wide[1][part]) * SCALE
        kept = (weights[part, :, :length] != 0).transpose(0, 1)
        expected.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1) * kept / KEPT, wide[2][part]))
    value = torch.cat(expected)
    wanted = torch.autograd.grad(value.square().sum(), wide)
    share = float((weights != 0).double().sum()) / sum(H * length**2 for length in lengths)
    assert abs(share - KEPT) < 0.15
    torch.testing.assert_close(restore(output.detach().cpu(), layout), value.float(), atol=2e-6, rtol=2e-5)
    for gradient, want in zip(gradients, wanted, strict=True):
        found = gradient.cpu().transpose(1, 2) if layout == "BNSD" else gradient.cpu()
        torch.testing.assert_close(found.reshape(want.shape), want.float(), atol=1e-5, rtol=1e-4)
