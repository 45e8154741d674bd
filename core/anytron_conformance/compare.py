"""Compare results of a platform with the expected results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron.proof.verification.comparisons import tolerance
from anytron_conformance.rules import Broken

if TYPE_CHECKING:
    from torch import Tensor

BITS = {2: torch.int16, 4: torch.int32}
"""Integers of as many bytes as a number has."""


def assert_close(found: Tensor | None, expected: Tensor, what: str, *, dtype: torch.dtype, factor: float = 1.0) -> None:
    """Compare a result with its definition.

    Args:
        found: Result of the platform; None = a missing gradient.
        expected: Result of the definition, preferably in float64.
        what: Name of the numbers, as the beginning of a sentence: ``The gradient of the keys``.
        dtype: Element type of the operands; it determines the tolerance.
        factor: Factor of the usual tolerance, for long sums.

    Raises:
        Broken: The results differ in shape, in NaN or infinity, or by more than the tolerance.
    """
    if found is None:
        raise Broken(f"{what} is missing: the results do not depend on this operand.")
    if found.shape != expected.shape:
        raise Broken(f"{what} has the wrong shape.", f"it is {tuple(found.shape)}, expected {tuple(expected.shape)}")
    got, want = found.detach().cpu().double(), expected.detach().cpu().double()
    if got.numel() == 0:
        return
    allowed = tolerance(str(dtype).removeprefix("torch."), want) * factor
    off = (got - want).abs()
    off = torch.where(got == want, 0.0, torch.where(off.isnan(), torch.inf, off))
    if bool((off <= allowed).all()):
        return
    place = torch.unravel_index(off.argmax(), off.shape)
    where = [int(index) for index in place]
    share = float((off > allowed).double().mean())
    sizes = f"it is {float(got[place]):.6g}, expected {float(want[place]):.6g}"
    raise Broken(
        f"{what} is wrong.",
        f"largest difference {float(off.max()):.3g} at {where} ({sizes}), allowed {allowed:.1g}; "
        f"{share:.0%} of the numbers are off",
    )


def assert_same_bits(found: Tensor, expected: Tensor, company: str) -> None:
    """Compare the bytes of results of the same rows in two calls.

    Args:
        found: Result of the call under test.
        expected: Result of the call with all rows, in the same shape.
        company: The rows, and what is beside them in the call under test, as the end of a sentence.

    Raises:
        Broken: A byte differs, or the shape or dtype.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise Broken(
            f"The shape or the dtype of the result depends on what else is in the call: {company}.",
            f"it is {tuple(found.shape)} {found.dtype}, expected {tuple(expected.shape)} {expected.dtype}",
        )
    got, want = (one.detach().cpu().contiguous() for one in (found, expected))
    different = got.view(BITS[got.itemsize]) != want.view(BITS[want.itemsize])
    if not bool(different.any()):
        return
    place = torch.unravel_index(different.int().argmax(), got.shape)
    where = [int(index) for index in place]
    raise Broken(
        f"The result depends on what else is in the call: {company}.",
        f"{float(different.double().mean()):.2%} of the numbers have other bits, the first at {where}: "
        f"{float(got[place]):.9g} instead of {float(want[place]):.9g}",
    )
