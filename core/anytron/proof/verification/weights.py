"""Compare the weights that an engine exports with those that it was built with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron.base.results import Result
from anytron.proof.verification.comparisons import measured
from anytron.task.data.model_files import tensor_names

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor


_SHARED = ("embed_tokens.weight", "lm_head.weight")
"""What some files and exports hold several times, and some once: an output layer may be the embedding, and multi-token
prediction modules have both in common with the model."""


def tied_copies(these: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> set[str]:
    """Return the names of tensors that only ``these`` has, and that equal an embedding or output layer of both."""
    shared = [these[name] for name in others if name.endswith(_SHARED) and name in these]
    return {name for name in these.keys() - others.keys() if any(torch.equal(these[name], one) for one in shared)}


def stored_weights(directory: Path) -> dict[str, Tensor]:
    """Read all tensors of the language model of a directory, on the host, under their names in that model alone."""
    from safetensors.torch import load_file

    inner = tensor_names(directory).inner
    tensors = (pair for file in sorted(directory.glob("*.safetensors")) for pair in load_file(file).items())
    return {own: tensor for name, tensor in tensors if (own := inner(name)) is not None}


def compare_weights(check: str, stored: Mapping[str, Tensor], exported: Mapping[str, Tensor], detail: str) -> Result:
    """Compare tensors bit for bit.

    Args:
        check: Name of the check.
        stored: Tensors of the checkpoint, by name.
        exported: Tensors that the engine exports, in its own dtype.
        detail: Text of the result if the tensors are equal.
    """
    missing = sorted(stored.keys() - exported.keys() - tied_copies(stored, exported))
    unknown = sorted(exported.keys() - stored.keys())
    if missing or unknown:
        where = "the checkpoint only" if missing else "the export only"
        first = (missing or unknown)[0]
        count = len(missing) + len(unknown)
        return Result(check, "failed", f"{count} tensors are missing on one side; the first, {first}, is in {where}")
    worst, unequal = 0.0, []
    for name, tensor in exported.items():
        original = stored[name].to(tensor.dtype)
        if not torch.equal(tensor, original):
            unequal.append(name)
            worst = max(worst, float((tensor.double() - original.double()).abs().max()))
    if unequal:
        detail = f"{len(unequal)} tensors differ, the first is {unequal[0]}"
    # torch.equal compares values: zeros of different signs are equal.
    return measured(check, worst, 0.0, detail)
