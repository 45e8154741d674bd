"""A run that goes on from a checkpoint in the same layout cannot be told from one that did not stop."""

from __future__ import annotations

import hashlib

import pytest
import torch

LAYOUTS = {
    "dp2-distributed-bfloat16": {
        "parallel": {"data_parallel_size": 2},
        "engine": {"distributed_optimizer": True},
        "model": {"dtype": "bfloat16"},
    },
    "tp2-bfloat16-critic": {
        "parallel": {"tensor_model_parallel_size": 2},
        "model": {"dtype": "bfloat16"},
        "critic": {"optimizer": {"lr": 1e-2}},
    },
}


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request):
    return LAYOUTS[request.param]


@pytest.fixture(scope="module")
def saved(save, layout):
    return save(**layout)


@pytest.mark.some(1)
def test_it_continues_bit_for_bit(saved, resume, layout):
    continued = resume(saved.path, **layout)
    assert continued.metrics == saved.continued.metrics
    for state in ("stopped", "weights"):
        found, expected = getattr(continued, state), getattr(saved.continued, state)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_every_file_is_there_with_its_size_and_checksum(saved):
    found = {path.name: path.read_bytes() for path in saved.path.iterdir()}
    assert {name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in found.items()} == {
        name: (record.size, record.sha256) for name, record in saved.files.items()
    }
