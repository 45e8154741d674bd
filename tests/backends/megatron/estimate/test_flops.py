"""Operations of a model against torch's own count of what transformers' model does, forward and backward."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from anytron.config.schema import RunConfig
from anytron.task.data.pretrained import model_class
from anytron.workers.engines.estimates import AttentionLayers, ModelFlops
from anytron_conformance.tiny_models import CONFIGS
from anytron_megatron.estimate.flops import model_flops
from tests.house import ROOT

LENGTH = 24
QWEN3_8B = json.loads((ROOT / "examples" / "models" / "Qwen3-8B" / "config.json").read_text())


def config(fields, **sections) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"config": fields, "tokenizer": "unused"},
            "data": {"source": "unused"},
            "rewards": [{"function": "unused"}],
            **sections,
        }
    )


def counted(family: str) -> int:
    """What torch counts of one sequence, whose attention computes every pair, also those that the mask hides."""
    from transformers import AutoConfig

    fields = dict(CONFIGS[family])
    torch.manual_seed(0)
    model = model_class(found := AutoConfig.for_model(fields.pop("model_type"), **fields)).from_config(
        found, attn_implementation="eager", experts_implementation="eager"
    )
    tokens = torch.randint(1, 30, (1, LENGTH))
    embedded = model.get_input_embeddings()(tokens).detach().requires_grad_()
    with FlopCounterMode(display=False) as counter:
        model(inputs_embeds=embedded, use_cache=False).logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_tied", "llama", "qwen3_moe", "deepseek_v3"])
def test_an_update_needs_what_torch_counts(family):
    """Equal but for what is no product of weights in our count: the table of rotary positions."""
    policy, critic = model_flops(config(CONFIGS[family]))
    assert critic is None
    both_halves = ModelFlops(policy.weights, tuple(AttentionLayers(2 * one.width) for one in policy.attention))
    assert both_halves.update([LENGTH]) == pytest.approx(counted(family), rel=0.01)
    assert policy.update([LENGTH]) < both_halves.update([LENGTH])


def test_a_published_model():
    """Qwen3-8B: 8,190,735,360 parameters, of which the embedding (622,329,856) is looked up, and norms are added."""
    policy, _ = model_flops(config(QWEN3_8B))
    assert policy.weights == pytest.approx(8_190_735_360 - 151936 * 4096, rel=1e-4)
    (attention,) = policy.attention
    assert (attention.width, attention.window) == (36 * 32 * 128, None)
    dense = 6 * policy.weights * 4096
    assert policy.update([4096]) == dense + 12 * 36 * 4096 * 4096**2 / 2
    assert policy.update([1024] * 4) == dense + 12 * 36 * 4096 * 4 * 1024**2 / 2, "packed"


def test_adapters_save_the_gradients_of_the_weights_and_a_critic_has_no_output_layer():
    lora, _ = model_flops(config(QWEN3_8B, model={"config": QWEN3_8B, "tokenizer": "t", "lora": {}}))
    whole, critic = model_flops(config(QWEN3_8B, critic={}, algorithm={"advantage": "gae"}))
    pairs = 12 * whole.attention[0].width / 2
    assert lora.update([1]) - pairs == pytest.approx(4 / 6 * (whole.update([1]) - pairs))
    assert whole.weights - critic.weights == 151936 * 4096


@pytest.mark.parametrize(("window", "length"), [(4, 3), (4, 4), (4, 9), (1, 5)])
def test_a_window_counts_the_pairs_in_it(window, length):
    exact = sum(min(place + 1, window) for place in range(length))
    seen = min(window, length)
    assert AttentionLayers(1.0, window).pairs(length) == exact - seen / 2, "half a pair for each on the diagonal"


def test_windowed_layers_are_told_from_others():
    fields = {**QWEN3_8B, "layer_types": ["full_attention", "sliding_attention"] * 18, "sliding_window": 128}
    policy, _ = model_flops(config(fields))
    assert [one.window for one in policy.attention] == [None, 128]
    assert policy.attention[0].width == policy.attention[1].width == 18 * 32 * 128
