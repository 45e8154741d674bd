"""Let Megatron's own products be company-invariant where the run asks for it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from anytron.kernels.contract import KernelName
from anytron_megatron.portable_te.binding import kernels

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor


def multiply_with_the_kernel(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``router_gating_linear``: use the kernel of linear layers if kernels are company-invariant."""

    @functools.wraps(original)
    def router_gating_linear(inp: Tensor, weight: Tensor, bias: Tensor | None, router_dtype: torch.dtype) -> Tensor:
        if not kernels().invariant:
            return original(inp, weight, bias, router_dtype)
        linear = kernels().shared(KernelName.LINEAR, router_dtype)
        logits: Tensor = linear(*(None if one is None else one.to(router_dtype) for one in (inp, weight, bias)))
        return logits

    return router_gating_linear
