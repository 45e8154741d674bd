"""Let Megatron's own products and functions be company-invariant where the run asks for it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from anytron.kernels.contract import KernelName
from anytron_megatron.portable_te.binding import kernels

if TYPE_CHECKING:
    from collections.abc import Callable

_VECTOR = 64
"""Elements after which a vectorised loop on the host computes the rest one by one, by another formula: a multiple of
the elements of two vectors of 512 bits in any type."""


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


class _Alone(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if func is functional.linear:
            x, weight, *rest = args
            bias = rest[0] if rest else (kwargs or {}).get("bias")
            return kernels().shared(KernelName.LINEAR, weight.dtype)(x, weight, bias)
        if func in (torch.sigmoid, torch.nn.functional.sigmoid):
            (x,) = args
            flat = functional.pad(x.flatten(), (0, -x.numel() % _VECTOR))
            return func(flat)[: x.numel()].view_as(x)
        return func(*args, **(kwargs or {}))
