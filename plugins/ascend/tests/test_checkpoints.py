"""A run that began on the processor goes on on two simulated NPUs, and one that began there goes on there exactly."""

from __future__ import annotations

import torch

from tests.backends.megatron.checkpoint.conftest import resume, run, save
from tests.backends.megatron.checkpoint.test_other_layouts import assert_continues
from tests.backends.megatron.conftest import policy_loss, ranks, recorded, start_engine, tiny_model

__all__ = ["policy_loss", "ranks", "recorded", "resume", "run", "save", "start_engine", "tiny_model"]  # fixtures

TWO_NPUS = {"platform": {"name": "ascend"}, "parallel": {"tensor_model_parallel_size": 2}}


def test_from_the_processor_to_two_npus(save, resume):
    saved = save(platform={"name": "cpu"})
    assert_continues(saved, resume(saved.path, **TWO_NPUS), tolerance=1e-4)


def test_from_two_npus_to_two_npus(save, resume):
    saved = save(**TWO_NPUS)
    continued = resume(saved.path, **TWO_NPUS)
    assert continued.metrics == saved.continued.metrics
    assert all(torch.equal(continued.weights[name], tensor) for name, tensor in saved.continued.weights.items())
