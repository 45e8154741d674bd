"""The four functions of verl that lay out micro-batches, replaced: one layout for every device, and no branch on it."""

from __future__ import annotations

from anytron import Patch, Phase
from anytron_verl.names import SUPPORTED

UTIL = "verl.models.mcore.util"


def _patch(function: str, reason: str) -> Patch:
    return Patch(
        id=f"verl.{function.replace('_', '-')}",
        owner="verl",
        target=f"{UTIL}:{function}",
        phase=Phase.AFTER_BUILD,
        package="verl",
        requires=SUPPORTED,
        reason=reason,
        remove_when="verl asks its platform for layouts and masks",
        replacement=f"anytron_verl.layouts:{function}",
    )


_THD = (
    "verl indexes jagged tensors row by row, which costs the square of the rows, and sets MindSpeed's globals on NPUs"
)
_BSHD = "verl makes a mask of all pairs of tokens on NPUs, once for each tensor, and pads row by row"
_BACK = "verl cuts the output row by row, and reads lengths from the mask"
PATCHES = (
    _patch("preprocess_thd_engine", _THD),
    _patch("postprocess_thd_engine", _BACK),
    _patch("preprocess_bshd_engine", _BSHD),
    _patch("postprocess_bshd_engine", _BACK),
)
"""They join the layer's own of the phase. Calls from outside of our engines' forward passes go to verl's functions."""
