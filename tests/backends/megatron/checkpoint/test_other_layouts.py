"""A run that goes on in another layout does what it would have done in its own, up to the order of sums."""

from __future__ import annotations

import pytest
import torch

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


@pytest.mark.parametrize("change", DENSE)
def test_a_dense_model(change, save, resume):
    before, after = DENSE[change]
    saved = save(**before)
    assert_continues(saved, resume(saved.path, **after))
