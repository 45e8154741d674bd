"""Embeddings and output layers that some files and exports hold several times, and some once.

An output layer may be the embedding; multi-token prediction modules have both in common with the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

_SHARED = ("embed_tokens.weight", "lm_head.weight")


def tied_copies(these: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> set[str]:
    """Name what only these tensors hold, if it is equal to an embedding or an output layer that both hold."""
    shared = [these[name] for name in others if name.endswith(_SHARED) and name in these]
    return {name for name in these.keys() - others.keys() if any(torch.equal(these[name], one) for one in shared)}
