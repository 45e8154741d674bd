"""Draw prompts epoch by epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from anytron.base.seeds import derive_seed

if TYPE_CHECKING:
    from collections.abc import Sequence

Item = TypeVar("Item")


class EpochSampler(Generic[Item]):
    """Give every item once per epoch, in an order of its own for each epoch.

    A draw that reaches the end of an epoch continues in the next one.

    Args:
        items: What is drawn from, at least one.
        seed: The order of every epoch follows from it.
        shuffle: False = the items' own order in every epoch.
    """

    def __init__(self, items: Sequence[Item], *, seed: int, shuffle: bool) -> None:
        self._items = items
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def place(self) -> tuple[int, int]:
        """Epochs behind it, and items drawn in the present one."""
        return self._epoch, self._position

    @property
    def drawn(self) -> int:
        """Items drawn in all epochs together."""
        return self._epoch * len(self._items) + self._position

    def seek(self, epoch: int, position: int) -> None:
        """Go to a place of a sampler of as many items with the same seed.

        Raises:
            ValueError: An epoch has fewer items.
        """
        if not 0 <= position <= len(self._items):
            raise ValueError(f"an epoch has {len(self._items)} items, so there is no position {position}")
        self._epoch, self._position, self._order = epoch, position, self._order_of(epoch)

    def draw(self, count: int) -> list[Item]:
        """Take the next ``count`` items."""
        drawn: list[Item] = []
        while len(drawn) < count:
            if self._position == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
            taken = self._order[self._position : self._position + count - len(drawn)]
            self._position += len(taken)
            drawn.extend(self._items[index] for index in taken)
        return drawn

    def _order_of(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(len(self._items)))
        generator = torch.Generator().manual_seed(derive_seed(self._seed, "data", epoch))
        order: list[int] = torch.randperm(len(self._items), generator=generator).tolist()
        return order
