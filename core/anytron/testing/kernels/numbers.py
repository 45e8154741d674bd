"""The numbers that kernels are called with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anytron.platform import Feature
from anytron.testing.rules import Case

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
    """Copy into a part of the last dimension of a larger tensor, as queries lie in a fused projection of all three."""
    size = tensor.shape[-1]
    larger = torch.full((*tensor.shape[:-1], 2 * size), torch.nan, dtype=tensor.dtype, device=tensor.device)
    larger[..., size:] = tensor
    return larger[..., size:]


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
