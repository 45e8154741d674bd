"""Experts that are given to a mixture of experts of transformers: its own change nothing, others everything."""

from __future__ import annotations

import pytest
import torch

from anytron.proof.verification.hugging_face import forced_routing, load_model
from anytron_conformance.tiny_models import write_tiny_model

TOKENS = torch.arange(3, 14)


def routers_of(model):
    return [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]


@pytest.fixture(params=["qwen3_moe", "deepseek_v3", "qwen3_next"])
def model(request, tmp_path):
    return load_model(write_tiny_model(request.param, tmp_path), None, torch.float32)


@torch.no_grad()
def computed(model, routing):
    """Logits, and the experts that each router sends tokens to: ``[T, L, K]``."""
    found = []
    hooks = [
        router.register_forward_hook(lambda _, __, output: found.append(output[2])) for router in routers_of(model)
    ]
    with forced_routing(model, routing):
        logits = model(TOKENS[None], use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, torch.stack(found, 1)


def test_its_own_experts_change_nothing(model):
    logits, own = computed(model, None)
    again, _ = computed(model, own.to(torch.uint8))
    torch.testing.assert_close(again, logits, atol=1e-6, rtol=0)


def test_other_experts_change_every_token_and_leave_nothing_behind(model):
    logits, own = computed(model, None)
    others, _ = computed(model, (own + 1) % 4)
    assert ((others - logits).abs().amax(-1) > 1e-3).all()
    after, _ = computed(model, None)
    assert torch.equal(after, logits)


def test_the_routing_of_another_model_is_refused(model):
    routing = torch.zeros(len(TOKENS), 7, 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match="routing has 7 layers"):
        computed(model, routing)
