"""The dtypes that the runtime says it supports."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from anytron.device.platform import Feature
from anytron.proof.checks import Inapplicable
from anytron_conformance.compare import assert_close
from anytron_conformance.rules import Broken, Case, rule

if TYPE_CHECKING:
    from torch import Tensor

    from anytron_conformance.subject import Subject


def convolution(images: Tensor, weights: Tensor) -> Tensor:
    """The first layer of a vision model."""
    return functional.conv3d(images, weights)


PRODUCT = ("The product", torch.matmul, ((16, 16), (16, 16)))
CONVOLUTION = ("The convolution", convolution, ((2, 3, 4, 8, 8), (16, 3, 2, 4, 4)))
CASES = [
    Case("float32", (torch.float32, *PRODUCT), 0),
    Case("float32, convolution", (torch.float32, *CONVOLUTION), 1),
    Case("bfloat16", (torch.bfloat16, *PRODUCT), 2, needs=(Feature.BFLOAT16,)),
    Case("float16", (torch.float16, *PRODUCT), 3),
]


@rule(
    "dtypes-compute",
    "device",
    "Matrix products run in every dtype that supports_dtype promises, and keep it; in float32 convolutions do, too.",
    cases=CASES,
)
def dtypes_compute(subject: Subject, case: Case) -> None:
    """A product of two matrices of each supported dtype is compared with float64; float32 is always needed.

    Usual faults: a wider or narrower dtype comes back, or products are computed with fewer bits than the dtype has. So
    are float32 convolutions, through which the patches of images go, where a library may round operands to ten bits
    (cuDNN: TF32, which torch allows by default).
    """
    dtype, what, compute, shapes = case.values
    if not subject.runtime.supports_dtype(dtype):
        if dtype is torch.float32:
            raise Broken("supports_dtype says no to float32, in which log-probs and main weights are.")
        raise Inapplicable(f"supports_dtype({case.name}) is False")
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    found = compute(one.to(subject.device), other.to(subject.device))
    if found.dtype != dtype:
        raise Broken(f"{what} has another dtype.", f"{found.dtype} of operands in {dtype}")
    assert_close(found, compute(one.double(), other.double()), what, dtype=dtype)
