"""Weights that the rollout engine rounds to 8 bits, against the table of all values of the format."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from anytron.base.errors import ConfigError
from anytron.workers.engines.rollout_engine import PromptInputs
from anytron_conformance.tiny_models import write_tiny_model
from anytron_rollout.quantization import quantized_weights, rounded_to_fp8


def values_of_e4m3():
    """All finite values of the format: a sign, 4 bits of exponent (bias 7), 3 bits of mantissa; the last is NaN."""
    found = []
    for code in range(127):  # 127 is NaN
        exponent, mantissa = code >> 3, (code & 7) / 8
        found.append((1 + mantissa) * 2.0 ** (exponent - 7) if exponent else mantissa * 2.0**-6)
    return torch.tensor([-value for value in reversed(found)] + found, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_number_becomes_the_nearest_one_that_its_row_s_scale_allows(dtype):
    generator = torch.Generator().manual_seed(3)
    sizes = torch.tensor([1e-4, 1.0, 30.0])[:, None]
    weight = (torch.randn(3, 500, generator=generator) * sizes).to(dtype)
    table = values_of_e4m3()
    found = rounded_to_fp8(weight).double()
    assert rounded_to_fp8(weight).dtype is dtype
    for row, rounded in zip(weight.double(), found, strict=True):
        scale = max(row.abs().max() / table.max(), 1 / (448 * 512))  # vLLM's lower limit: the first row is below it
        nearest = (row[:, None] / scale - table).abs().min(-1).values * scale
        # float32 rounds the scale and the product, and bfloat16 the result, to 8 bits; which may be 7 % larger.
        slack = row.abs() * (1.07 * 2**-8 if dtype is torch.bfloat16 else 1e-6)
        assert bool(((rounded - row).abs() <= nearest + slack).all())
        assert (rounded - row).abs().max() > nearest.max() * 0.9 > 0, "something must be rounded"
    assert torch.equal(rounded_to_fp8(weight[1:2]), rounded_to_fp8(weight)[1:2]), "rows are independent"
    assert torch.equal(rounded_to_fp8(torch.zeros(2, 3)), torch.zeros(2, 3))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_engine_rounds_linear_layers_and_experts_after_each_update_and_nothing_else(
    family, new_engine, write, tmp_path
):
    directory = write_tiny_model(family, tmp_path / family)
    engines = [new_engine(model={"path": str(directory)}, **rollout) for rollout in ({"quantization": "fp8"}, {})]
    sent = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for version in (1, 2):
        for tensor in sent.values():
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.1)
        for engine in engines:
            engine.load_weights(write(sent, version))
        quantized, plain = (dict(engine._model.named_parameters()) for engine in engines)
        rounded = {name for name, tensor in quantized.items() if not torch.equal(tensor, plain[name])}
        projections = {name for name in plain if "_proj" in name and plain[name].ndim > 1}
        assert rounded == projections
        assert len(rounded) >= 8
        for name in rounded:
            each = plain[name].view(-1, *plain[name].shape[-2:])
            expected = torch.stack([rounded_to_fp8(matrix) for matrix in each]).view_as(plain[name])
            assert torch.equal(quantized[name], expected)
        prompt = PromptInputs((3, 1, 9, 5, 10))
        given = [engine.logits([prompt])[0].log_softmax(-1) for engine in engines]
        assert 1e-3 < (given[0] - given[1]).abs().mean() < 1.0
    engines[0].sleep()
    engines[0].load_weights(write(sent, 3))
    assert torch.equal(engines[0].logits([prompt])[0].log_softmax(-1), given[0]), "also after sleep"


def test_a_model_without_linear_layers_is_refused():
    class Other(nn.Module):
        def get_decoder(self):
            return nn.Conv1d(1, 1, 1)

    with pytest.raises(ConfigError, match=r"(?s)rollout\.quantization.*Other has no linear layers"):
        quantized_weights(Other())
