"""Weights on their way to the rollout engine: one safetensors file and its manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from safetensors.torch import save_file

from anytron.trainer.checksum import checksum
from anytron.trainer.roles import WeightManifest

if TYPE_CHECKING:
    from torch import Tensor


def write_weights(
    weights: dict[str, Tensor], path: str, version: int, optional: frozenset[str] = frozenset()
) -> WeightManifest:
    """Write weights.

    Args:
        weights: Contiguous tensors on the host, by their Hugging Face names.
        path: The file.
        version: Optimizer updates behind them.
        optional: Names that a rollout engine may leave out.
    """
    save_file(weights, path)
    checksums = {name: checksum(tensor) for name, tensor in weights.items()}
    return WeightManifest(path, version, checksums, optional)
