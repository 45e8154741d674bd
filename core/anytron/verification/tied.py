"""An output layer that is the embedding: some files and exports hold it under both names, some under one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


def tied_output(these: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> set[str]:
    """Name the output layer if these tensors hold it beside an embedding that is equal, and the others hold it once."""
    tied = {"lm_head.weight"} & these.keys() - others.keys()
    embeddings = [name for name in others if name.endswith("embed_tokens.weight") and name in these]
    return {name for name in tied if any(torch.equal(these[name], these[other]) for other in embeddings)}
