"""Padding is not routed, and the expert bias follows the tokens of updates alone. DeepSeek-V3: MLA, a dense layer."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from tests.backends.megatron.experts.test_agreement import differences
from tests.slow import slow_but

RATE = 0.01
BIAS = "model.layers.{}.mlp.gate.e_score_correction_bias"
LAYERS = (1, 2, 3)  # layer 0 is dense
SETTINGS = {
    "moe_aux_loss_coeff": 0.05,
    "moe_z_loss_coeff": 0.01,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_router_bias_update_rate": RATE,
}
PADDED = {
    "bshd": {"engine": {"sequence_format": "bshd"}},
    "tp2-sp-ep2": {
        "parallel": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
    },
    "pp2-interleaved-recompute": {  # its first chunk has no router
        "engine": {"recompute": "full"},
        "parallel": {"pipeline_model_parallel_size": 2},
        "options": {"virtual_pipeline_model_parallel_size": 2},
    },
}
ALIGN = (
    "@hookimpl",
    "def patch_model(self, phase):",
    "    if phase is not Phase.BEFORE_BUILD:",
    "        return []",
    "    return [Patch('meddler.align', 'anytron.device.platform:Platform.layout_constraints', phase, 'a test',",
    "                  replacement='meddler:Meddler.align')]",
    "@staticmethod",
    "def align(original):",
    "    return lambda platform, request: LayoutConstraints(align=16)",
)
"""The platform asks for padding."""
FORGET = (
    "@hookimpl",
    "def build_attn_mask(self):",
    "    return AttnMask(MaskKind.NONE, 'padding_causal')",
)


@pytest.fixture(scope="module")
def without_padding(train):
    return train("deepseek_v3", transformer=SETTINGS)


@pytest.mark.parametrize("layout", slow_but(PADDED, "bshd"))
def test_padding_changes_nothing(layout, without_padding, train, extension):
    extension(*ALIGN)
    found = differences(without_padding, train("deepseek_v3", transformer=SETTINGS, **PADDED[layout]))
    assert found["metrics"] <= 1e-5, found
    assert found["weights"] <= 1e-5, found


def test_a_platform_that_forgets_the_padding_mask_is_noticed(without_padding, train, extension):
    extension(*ALIGN, *FORGET)
    found = differences(without_padding, train("deepseek_v3", transformer=SETTINGS))
    assert found["metrics"] > 1e-3, found
    assert found["weights"] >= RATE, found


def test_the_expert_bias_moves_once_per_update_by_the_updates_own_tokens(without_padding, tiny_family):
    """Auxiliary-loss-free balancing, arXiv:2408.15664, algorithm 1; the update replays the recorded routing."""
    before = load_file(tiny_family("deepseek_v3") / "model.safetensors")
    for column, layer in enumerate(LAYERS):
        chosen = without_padding.batch.routing[:, column].long()
        counts = torch.bincount(chosen.flatten(), minlength=4).float()
        step = RATE * torch.sign(counts.mean() - counts)
        bias = before[BIAS.format(layer)]
        for exported in without_padding.weights:
            bias = bias + step
            torch.testing.assert_close(exported[BIAS.format(layer)], bias, atol=1e-7, rtol=0)


@pytest.mark.slow
def test_what_only_fills_up_a_copys_share_is_not_counted(train, recorded):
    five = recorded.select(torch.arange(5))
    weight = five.response_mask / five.response_mask.sum()
    five = dataclasses.replace(five, loss_weights=weight, token_shares=weight)
    one = train("deepseek_v3", five, transformer=SETTINGS)
    parallel = {"data_parallel_size": 2, "expert_model_parallel_size": 2}
    found = differences(one, train("deepseek_v3", five, transformer=SETTINGS, parallel=parallel))
    assert found["metrics"] <= 1e-5, found
    assert found["weights"] <= 1e-5, found
