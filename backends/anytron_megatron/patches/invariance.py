"""Let Megatron's own products and functions be company-invariant where the run asks for it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch.nn import functional

from anytron.kernels.contract import KernelName
from anytron.kernels.invariant import OneFormula
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
        operands = (None if one is None else one.to(router_dtype) for one in (inp, weight, bias))
        logits: Tensor = kernels().shared(KernelName.LINEAR, router_dtype)(*operands)
        return logits

    return router_gating_linear


def compute_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function with products and sigmoids: in each, compute a row as if it were alone."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if not kernels().invariant:
            return original(*args, **kwargs)
        with _Alone():
            return original(*args, **kwargs)

    return function


class _Alone(OneFormula):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.linear:
            x, weight, *rest = args
            bias = rest[0] if rest else (kwargs or {}).get("bias")
            return kernels().shared(KernelName.LINEAR, weight.dtype)(x, weight, bias)
        return super().__torch_function__(func, types, args, kwargs)
