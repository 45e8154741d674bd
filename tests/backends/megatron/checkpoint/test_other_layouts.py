"""A run that goes on in another layout does what it would have done in its own, up to the order of sums."""

from __future__ import annotations

import pytest
import torch

from anytron.device.patches.plan import in_range, installed_version
from anytron_conformance.tiny_models import turn_last_layers_into_prediction_modules, write_tiny_model
from anytron_megatron.models.release import HAS_MAMBA
from tests.slow import slow_but

TP2 = {"parallel": {"tensor_model_parallel_size": 2}}
PP2 = {"parallel": {"pipeline_model_parallel_size": 2}}
CP2 = {"parallel": {"context_parallel_size": 2}}
DP2 = {"parallel": {"data_parallel_size": 2}, "engine": {"distributed_optimizer": True}}
VPP2 = {**PP2, "engine": {"options": {"virtual_pipeline_model_parallel_size": 2}}}
ONE: dict = {}

DENSE = {
    "tp1-tp2": (ONE, TP2),
    "pp2-dp2": (PP2, DP2),
    "dp2-vpp2": (DP2, VPP2),
    "tp2-cp2": (TP2, CP2),
    "dp2-one": (DP2, ONE),
}


def assert_continues(saved, continued, tolerance=2e-5):
    """The weights come back bit for bit, and the updates after them within the tolerance of other layouts."""
    expected = saved.continued
    assert continued.stopped.keys() == expected.stopped.keys()
    assert [n for n, tensor in expected.stopped.items() if not torch.equal(continued.stopped[n], tensor)] == []
    for found, wanted in zip(continued.metrics, expected.metrics, strict=True):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    far = {name: (continued.weights[name] - tensor).abs().max().item() for name, tensor in expected.weights.items()}
    assert max(far.values()) <= tolerance, {name: value for name, value in far.items() if value > tolerance}
    moved = [(tensor - expected.stopped[name]).abs().max().item() for name, tensor in expected.weights.items()]
    assert max(moved) > 100 * tolerance


@pytest.mark.some(1)
@pytest.mark.parametrize("change", slow_but(DENSE, "tp1-tp2", "pp2-dp2"))
def test_a_dense_model(change, save, resume):
    before, after = DENSE[change]
    saved = save(**before)
    assert_continues(saved, resume(saved.path, **after))


def experts(**sections):
    """Adds what models of several experts need; their load moves the bias of sigmoid routers, which must come back."""
    engine = {"max_tokens_per_micro_batch": 1, **sections.get("engine", {})}
    return {**sections, "engine": engine}


EP2 = {"parallel": {"data_parallel_size": 2, "expert_model_parallel_size": 2}}
EP2_DISTRIBUTED = {**EP2, "engine": {"distributed_optimizer": True}}
FAMILIES = {
    "qwen3_moe": (EP2, ONE),
    "deepseek_v3": (EP2_DISTRIBUTED, TP2),
    "qwen3_next": (ONE, TP2),
    "qwen3_5": (TP2, PP2),
}


@pytest.mark.some(1)
@pytest.mark.parametrize("family", slow_but(FAMILIES, "qwen3_moe"))
def test_another_family(family, save, resume, tiny_family):
    before, after = FAMILIES[family]
    model = {"path": str(tiny_family(family))}
    saved = save(**experts(**before, model=model))
    assert_continues(saved, resume(saved.path, **experts(**after, model=model)))


TP2_EP2 = {"parallel": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}}


@pytest.mark.families
@pytest.mark.mcore
@pytest.mark.skipif(
    not in_range(installed_version("megatron-core"), HAS_MAMBA), reason="refused with this megatron-core"
)
def test_mamba_layers(save, resume, tiny_family):
    """Their places in the files are those of parts of weights, each split over tensor-parallel ranks."""
    model = {"path": str(tiny_family("nemotron3"))}
    saved = save(**experts(**TP2_EP2, model=model))
    assert_continues(saved, resume(saved.path, **experts(**EP2, model=model)))


LORA = {"rank": 4, "alpha": 8.0}
ADAPTED = {
    "qwen3": (ONE, TP2),
    "qwen3_moe": (EP2, ONE),
    "qwen3_5": (TP2, PP2),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_but(ADAPTED, "qwen3"))
def test_adapters(family, save, resume, tiny_family):
    before, after = ADAPTED[family]
    model = {"path": str(tiny_family(family)), "lora": LORA}
    saved = save(**experts(**before, model=model))
    assert_continues(saved, resume(saved.path, **experts(**after, model=model)))


@pytest.mark.slow
def test_multi_token_prediction(save, resume, tmp_path):
    model = {"path": str(write_tiny_model("deepseek_v3", tmp_path, num_hidden_layers=4, hidden_size=32))}
    turn_last_layers_into_prediction_modules(tmp_path, 2)
    engine = {"options": {"mtp_loss_coefficient": 0.1}}
    saved = save(**experts(**PP2, model=model, engine=engine))
    assert any("eh_proj" in name for name in saved.continued.weights)
    assert_continues(saved, resume(saved.path, **experts(**TP2, model=model, engine=engine)))


@pytest.mark.slow
def test_a_critic(save, resume):
    critic = {"optimizer": {"lr": 1e-2}}
    saved = save(**TP2, critic=critic)
    assert_continues(saved, resume(saved.path, **PP2, critic=critic))
