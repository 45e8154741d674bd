"""The numbers that kernels are called with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anytron.device.platform import Feature
from anytron_conformance.rules import Case

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

DTYPES = (torch.float32, torch.bfloat16)
"""In which kernels are checked; bfloat16 where the platform does not decline it."""


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Draw standard normal numbers, float32, on the host; the same everywhere."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sliced(tensor: Tensor) -> Tensor:
    """Copy into every other entry of the last dimension of a larger tensor, as nothing that is contiguous lies.

    The entries between are NaN: a kernel that ignores strides meets them.
    """
    larger = torch.full((*tensor.shape, 2), torch.nan, dtype=tensor.dtype, device=tensor.device)
    larger[..., 0] = tensor
    return larger[..., 0]


def split_off(tensor: Tensor) -> Tensor:
    """Copy into a part of a larger tensor: one of the heads, as queries lie in a fused projection, or of each row."""
    heads = tensor.dim() >= 3
    halves = torch.full((2, *tensor.shape), torch.nan, dtype=tensor.dtype, device=tensor.device)
    larger = torch.cat(tuple(halves), dim=-2 if heads else -1)
    part = larger[..., tensor.shape[-2] :, :] if heads else larger[..., tensor.shape[-1] :]
    return part.copy_(tensor)


def in_dtypes(named: Iterable[tuple[str, object, tuple[Feature, ...]]]) -> Iterator[Case]:
    """Make a case of each (name, values, needs) in each of :data:`DTYPES`, in the given order.

    A case's values are then (dtype, values).
    """
    listed = list(named)
    for dtype in DTYPES:
        for name, values, needs in listed:
            extra = (Feature.BFLOAT16,) if dtype is torch.bfloat16 else ()
            short = str(dtype).removeprefix("torch.")
            size = len(listed) * DTYPES.index(dtype) + listed.index((name, values, needs))
            yield Case(f"{name}, {short}" if name else short, (dtype, values), size, (*needs, *extra))
