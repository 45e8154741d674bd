"""What the rules about parts of a run that not every run has, such as adapters and a critic, have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file

from anytron.proof.verification.comparisons import largest, measured, tolerance
from anytron.proof.verification.gradients import compare_gradients
from anytron_conformance.training_ranks import hold

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

RATE = 1e3
"""Learning rate of an update that shows a gradient in full precision: what is left of a weight beside it is small."""
SHOWN: Mapping[str, Any] = {"name": "sgd", "lr": RATE, "clip_grad": 0.0}
"""The optimizer of such an update."""


def weights_of(model: Path) -> dict[str, Tensor]:
    """Read the weights of a tiny model."""
    return load_file(model / "model.safetensors")


def gradients_shown(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give the gradients of an update with :data:`SHOWN`, float32, by the weights' names in files."""
    return {name: (before[name] - tensor) / RATE for name, tensor in after.items() if name in before}


def hold_values(what: str, found: Tensor, expected: Tensor, dtype: str) -> None:
    """Hold values of tokens against what they should be, float32 ``[T]`` both.

    Args:
        what: Names them at the beginning of a sentence, and says whose they should be.
        found: The platform's.
        expected: Those of transformers.
        dtype: ``model.dtype``.

    Raises:
        Broken: They differ.
    """
    result = measured("", largest(found - expected), tolerance(dtype, expected), f"{len(expected)} tokens")
    hold(result, what)


def hold_gradients(
    what: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], dtype: str, of: str = "parameters"
) -> None:
    """Hold gradients against those of transformers, float32 by the weights' names in files.

    Args:
        what: What a difference means, a sentence for the platform's author.
        found: The platform's.
        expected: Those of transformers; each must be there.
        dtype: ``model.dtype``.
        of: What they belong to.

    Raises:
        Broken: They differ.
    """
    hold(compare_gradients("", found, expected, dtype=dtype, skipped={}, what=of, whose="transformers'"), what)
