"""Round weights to 8-bit floats as an engine with kernels for them would, and compute with them in the model's dtype.

Legend: O outputs and I inputs of a linear layer, E experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from anytron.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

E4M3_MAX = 448.0
"""Largest finite value of the format e4m3 (4 bits of exponent, 3 of mantissa; https://arxiv.org/abs/2209.05433)."""
SMALLEST_SCALE = 1.0 / (E4M3_MAX * 512)
"""Lower limit of a scale, as in vLLM (model_executor/layers/quantization/online/fp8.py, ``_fp8_channel_scale``)."""


def rounded_to_fp8(weight: Tensor) -> Tensor:
    """Round a matrix to e4m3 with one scale for each row, and multiply the scales again.

    vLLM's ``fp8_per_channel`` rounds linear layers in the same way. A row's scale does not depend on other rows, so
    that it makes no difference that vLLM joins the matrices of some layers.

    Args:
        weight: ``[O, I]``, any floating dtype.

    Returns:
        The rounded matrix, in the same dtype.
    """
    scale = (weight.abs().amax(-1, keepdim=True).float() / E4M3_MAX).clamp(min=SMALLEST_SCALE)
    eighth = (weight.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return (eighth.float() * scale).to(weight.dtype)


def quantized_weights(model: PreTrainedModel) -> list[Tensor]:
    """Find the weights that are rounded: matrices ``[O, I]`` of linear layers, and ``[E, O, I]`` of experts.

    The others keep their precision, as in vLLM: embeddings, the output head, norms, and routers of experts.

    Args:
        model: A Hugging Face model.

    Raises:
        ConfigError: The model has no linear layers.
    """
    decoder = model.get_decoder()
    linear = [module.weight for module in decoder.modules() if isinstance(module, nn.Linear)]
    experts = [weight for name, weight in decoder.named_parameters() if ".experts." in name and weight.ndim == 3]
    if not linear and not experts:
        raise ConfigError(
            "The rollout engine finds no weights that it could round.",
            where="rollout.quantization",
            why=f"{type(model).__name__} has no linear layers of torch",
            fix="remove rollout.quantization",
        )
    return [*linear, *experts]


@torch.no_grad()
def quantize(weights: Sequence[Tensor]) -> None:
    """Round weights in place, one matrix after the other: the memory for one matrix in float32 is needed."""
    for weight in weights:
        for matrix in weight.view(-1, *weight.shape[-2:]):
            matrix.copy_(rounded_to_fp8(matrix))
