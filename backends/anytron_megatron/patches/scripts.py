"""Fixes of Megatron-LM's own scripts, which ``anytron-megatron`` runs."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def allow_no_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``initialize_megatron``, which demands that ``torch.cuda.is_available()``: turn off this demand alone."""
    return functools.partial(original, allow_no_cuda=True)


def load_no_kernels(_original: Callable[..., Any]) -> Callable[..., None]:
    """Replace ``megatron.legacy.fused_kernels.load``, which runs nvcc for its version and compiles nothing."""
    return lambda _args: None
