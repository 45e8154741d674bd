"""The dtypes that the runtime says it supports."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron.device.limits import Feature
from anytron.proof.conformance.compare import assert_close
from anytron.proof.conformance.rules import Broken, Case, Inapplicable, rule

if TYPE_CHECKING:
    from anytron.proof.conformance.subject import Subject

CASES = [
    Case("float32", torch.float32, 0),
    Case("bfloat16", torch.bfloat16, 1, needs=(Feature.BFLOAT16,)),
    Case("float16", torch.float16, 2),
]


@rule(
    "dtypes-compute",
    "device",
    "Matrix products run in every dtype that supports_dtype promises, and keep it.",
    cases=CASES,
)
def dtypes_compute(subject: Subject, case: Case) -> None:
    """A product of two matrices of each supported dtype is compared with float64; float32 is always needed.

    Usual faults: a wider or narrower dtype comes back, or products are computed with fewer bits than the dtype has.
    """
    dtype: torch.dtype = case.values
    if not subject.runtime.supports_dtype(dtype):
        if dtype is torch.float32:
            raise Broken("supports_dtype says no to float32, in which log-probs and main weights are.")
        raise Inapplicable(f"supports_dtype({case.name}) is False")
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(16, 16, generator=generator).to(dtype) for _ in range(2))
    found = one.to(subject.device) @ other.to(subject.device)
    if found.dtype != dtype:
        raise Broken("The product has another dtype.", f"{found.dtype} of operands in {dtype}")
    assert_close(found, one.double() @ other.double(), "The product", dtype=dtype)
