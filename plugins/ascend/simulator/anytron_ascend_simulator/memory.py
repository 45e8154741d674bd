"""Access simulated device memory from the host: the same bytes as a CPU tensor."""

from __future__ import annotations

import torch

CPU = torch.device("cpu")


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of a simulated NPU tensor; valid as long as that tensor lives."""
    storage = tensor.untyped_storage()
    return from_pointer(
        storage.data_ptr(), storage.nbytes(), tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride()
    )


def from_pointer(
    pointer: int,
    size: int,
    dtype: torch.dtype,
    offset: int,
    shape: torch.Size | list[int],
    strides: tuple[int, ...] | list[int],
) -> torch.Tensor:
    """A CPU tensor over ``size`` bytes at ``pointer``; offset and strides in elements."""
    storage = torch._C._construct_storage_from_data_pointer(pointer, CPU, size)
    return torch.empty(0, dtype=dtype, device=CPU).set_(storage, offset, shape, strides)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to a simulated device, strides kept."""
    copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.numel():
        host_view(copy).copy_(tensor)
    return copy
