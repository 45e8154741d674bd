"""Random weights show what transformers' initial ones would hide."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from anytron.proof.shrinking.weights import draw_telling_values
from anytron.proof.verification.comparisons import FACTORS
from anytron_conformance.tiny_models import TEXT

TOKENS = torch.arange(3, 23)[None]


def drawn(activation, *, telling=True):
    torch.manual_seed(0)
    fields = {**TEXT, "num_hidden_layers": 2, "hidden_act": activation, "hidden_activation": activation}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma", **fields), dtype=torch.float32).eval()
    if telling:
        draw_telling_values(model)
    return model


@torch.no_grad()
def difference_of_the_exact_function(model):
    """Largest relative difference of the logits if the exact GELU takes the place of its approximation."""
    before = model(TOKENS).logits
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.GELU()
    return float((model(TOKENS).logits - before).abs().max() / before.abs().max())


def test_the_exact_gelu_differs_from_its_approximation_by_more_than_rounding():
    assert difference_of_the_exact_function(drawn("gelu_pytorch_tanh")) > 5 * FACTORS["float32"]
    assert difference_of_the_exact_function(drawn("gelu_pytorch_tanh", telling=False)) < FACTORS["float32"]


def test_weights_before_another_function_are_as_transformers_draws_them():
    for name, widened in (("gelu_pytorch_tanh", True), ("silu", False)):
        gate = drawn(name).model.layers[0].mlp.gate_proj.weight
        assert (float(gate.detach().std()) > 0.1) is widened
