"""The checksum by which weights are recognised on their way from one engine to the other."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def checksum(tensor: Tensor) -> int:
    """Compute the crc32 of a tensor's bytes, row-major, as they lie in a safetensors file."""
    data = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(data.numpy().data)
