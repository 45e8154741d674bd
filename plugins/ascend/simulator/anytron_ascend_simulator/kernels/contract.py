"""Errors of kernels, and gradients of their reference formulas by autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


class ContractError(ValueError):
    """The arguments of an operator do not meet its documented requirements."""


def require(holds: bool, text: str) -> None:
    """Raise a :class:`ContractError` unless ``holds``."""
    if not holds:
        raise ContractError(text)


def gradients(formula: Callable[..., Tensor], inputs: Sequence[Tensor], cotangent: Tensor) -> tuple[Tensor, ...]:
    """Vector-Jacobian products of ``formula`` at ``inputs``, in float32.

    Kernels run below autograd, so its dispatch keys are restored while this function runs.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradOther", "AutogradCPU", "AutogradPrivateUse1", "AutogradMeta", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        leaves = [tensor.detach().float().requires_grad_() for tensor in inputs]
        return torch.autograd.grad(formula(*leaves), leaves, cotangent.float())
