"""The adapters of a run with LoRA: two narrow matrices for each layer that Megatron keeps as one."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from anytron_megatron.lora.names import ALL_LINEAR, LAYERS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from anytron.config.schema import LoraSection
    from anytron_megatron.estimate.sharding import Piece

_SECOND = frozenset({"k_proj", "v_proj", "up_proj"})
"""Layers that share their ``A`` with another one that is counted."""


def adapter_pieces(pieces: Iterable[Piece], lora: LoraSection) -> list[Piece]:
    """Estimate the adapters of a rank's layers; Megatron splits one of the two matrices, which is not counted here."""
    wanted = [one.rpartition(".")[2] for one in lora.targets]
    kinds = {kind for name, several in LAYERS.items() if ALL_LINEAR in wanted or name in wanted for kind in several}
    found = []
    for piece in pieces:
        if piece.layer is None or len(piece.shape) < 2 or piece.kind not in kinds or piece.name.endswith(".bias"):
            continue
        part = piece.size / max(1, prod(piece.shape))
        size = lora.rank * (piece.shape[-2] + (0 if piece.kind in _SECOND else piece.shape[-1]))
        matrices = piece.shape[0] if len(piece.shape) == 3 else 1
        found.append(replace(piece, size=int(size * matrices * (part if piece.expert else 1.0))))
    return found
