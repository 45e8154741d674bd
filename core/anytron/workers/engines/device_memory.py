"""Free the device memory of tensors for a while, and allocate it again.

Tensor objects stay valid: only their storage is emptied, so that every view has its values again afterwards. While the
storage is empty, the tensors must not be used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, UntypedStorage


@dataclass(frozen=True)
class MemoryUse:
    """Device memory of one process, in bytes.

    Attributes:
        peak: Peak of allocated bytes since the peak was last read, or since the process began; None = unknown to torch.
        released: Bytes that the process has returned to the device.
    """

    peak: int | None
    released: int


class Parked:
    """Tensors whose storages are empty until :meth:`take_back`.

    Args:
        kept: Tensors whose values are needed again: they are copied to the host.
        dropped: Tensors whose values are not needed: they are zeros afterwards. Tensors that share memory with ``kept``
            keep their values.
        pin: Whether the host's memory can be pinned for the device, so that copies are fast.

    Attributes:
        num_bytes: Bytes that were returned to the device.
    """

    def __init__(self, kept: Iterable[Tensor], dropped: Iterable[Tensor] = (), *, pin: bool) -> None:
        kept_storages = _storages(kept)
        dropped_storages = {key: one for key, one in _storages(dropped).items() if key not in kept_storages}
        self.num_bytes = 0
        self._emptied: list[tuple[UntypedStorage, int, Tensor | None]] = []
        for storage in kept_storages.values():
            values = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pin)
            values.copy_(_bytes(storage))
            self._empty(storage, values)
        for storage in dropped_storages.values():
            self._empty(storage, None)

    def take_back(self) -> None:
        """Allocate the memory again and restore the values. A second call has no effect."""
        while self._emptied:
            storage, size, values = self._emptied.pop()
            storage.resize_(size)
            if values is None:
                _bytes(storage).zero_()
            else:
                _bytes(storage).copy_(values)

    def _empty(self, storage: UntypedStorage, values: Tensor | None) -> None:
        self._emptied.append((storage, storage.nbytes(), values))
        self.num_bytes += storage.nbytes()
        storage.resize_(0)


def _storages(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    """Return the storages of tensors by address, without empty ones; a shared storage is returned once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


def _bytes(storage: UntypedStorage) -> Tensor:
    """View all of a storage, uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
