"""Primitives that torch_npu's C++ calls directly, past the dispatcher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor


def _fill(target: Tensor, value: Any) -> None:
    target.fill_(value)


def _zero(target: Tensor) -> None:
    target.zero_()


def _one(target: Tensor) -> None:
    target.fill_(1)


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _cast(source: Tensor, _dtype: torch.dtype | None, target: Tensor) -> None:
    target.copy_(source)


def _pad(source: Tensor, padding: list[int], value: Any, target: Tensor) -> None:
    target.copy_(torch.nn.functional.pad(source, padding, value=value))


KERNELS = {
    "aclnnInplaceFillScalar": _fill,
    "aclnnInplaceZero": _zero,
    "aclnnInplaceOne": _one,
    "aclnnInplaceCopy": _copy,
    "aclnnCast": _cast,
    "aclnnConstantPadNd": _pad,
}
