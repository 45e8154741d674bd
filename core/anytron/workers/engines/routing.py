"""The experts to which a mixture of experts sent tokens, as a rollout engine tells them and a training engine repeats.

One row for each token of prompt and response *but the last*: no engine computes the token that ends a sequence, and
nothing that is learnt depends on where it goes. Legend: T tokens, L mixture-of-experts layers, K experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RoutingShape:
    """What a model's routing looks like.

    Attributes:
        layers: L, those with a router, from the first to the last of the model.
        chosen: K.
        experts: How many a layer has; a choice is one of their numbers, from 0.
    """

    layers: int
    chosen: int
    experts: int

    @property
    def dtype(self) -> torch.dtype:
        """The smallest type that holds the numbers."""
        return torch.uint8 if self.experts <= 256 else torch.int16

    def mistake_in(self, routing: Tensor | None, tokens: int) -> str | None:
        """Say what is wrong with the routing ``[tokens - 1, L, K]`` of a sequence; None if nothing is."""
        if routing is None:
            return "it has no routing"
        expected = (tokens - 1, self.layers, self.chosen)
        if tuple(routing.shape) != expected or routing.dtype is not self.dtype:
            return f"its routing is {routing.dtype} {tuple(routing.shape)}, expected {self.dtype} {expected}"
        if not routing.numel():
            return None
        low, high = (int(value) for value in routing.aminmax())
        if low < 0 or high >= self.experts:
            return f"its routing names expert {high if high >= self.experts else low} of {self.experts}"
        ordered = routing.sort(-1).values
        if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
            return "its routing sends a token to one expert twice"
        return None
