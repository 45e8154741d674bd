"""Weights on their way to the rollout engine: one safetensors file and its manifest."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


@dataclass(frozen=True)
class WeightManifest:
    """Weights on their way to the rollout engine.

    Attributes:
        path: safetensors file, readable by the rollout process.
        version: Optimizer updates behind these weights.
        checksums: crc32 of each tensor's bytes, by Hugging Face name.
        optional: Names of tensors that a rollout engine leaves out if its model has none of that name:
            modules for speculative decoding, which not every engine builds.
    """

    path: str
    version: int
    checksums: Mapping[str, int]
    optional: frozenset[str] = frozenset()


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
    from safetensors.torch import save_file

    save_file(weights, path)
    checksums = {name: checksum(tensor) for name, tensor in weights.items()}
    return WeightManifest(path, version, checksums, optional)


def checksum(tensor: Tensor) -> int:
    """Compute the crc32 of a tensor's bytes, row-major, as they lie in a safetensors file."""
    data = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(data.numpy().data)
