"""Freeze parts of a vision-language model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.base.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from anytron.config.schema import ModelPart


def freeze(
    chunks: Sequence[torch.nn.Module], parts: Sequence[ModelPart], prefixes: Mapping[ModelPart, Sequence[str]]
) -> None:
    """Freeze parts of a model, before its gradient buffers and optimizer are built.

    Their parameters get no gradient and no optimizer state, and stay the same bit for bit.

    Args:
        chunks: The model on this rank.
        parts: What to freeze.
        prefixes: Beginnings of the names of each part's parameters; the longest decides, as aligners are inside
            of vision towers.

    Raises:
        EngineError: A part has no parameters, on a rank that holds the vision tower.
    """
    named = [item for chunk in chunks for item in chunk.named_parameters()]
    part_of_prefix = {prefix: part for part, several in prefixes.items() for prefix in several}
    found: set[ModelPart] = set()
    for name, parameter in named:
        matching = [prefix for prefix in part_of_prefix if name.startswith(prefix)]
        part = part_of_prefix[max(matching, key=len)] if matching else None
        if part is not None and part in parts:
            found.add(part)
            parameter.requires_grad_(False)
    missing = [part for part in parts if part not in found]
    if missing and any(getattr(chunk, "visual", None) is not None for chunk in chunks):
        raise EngineError(
            "A part to freeze has no parameters.",
            where="model.freeze",
            why=f"no parameter of this model belongs to {', '.join(missing)}",
            fix="leave it out",
        )
