"""``_fused_adamw_``: AdamW in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron_ascend_simulator.kernels.contract import require

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def _adamw(
    param: Tensor,
    first: Tensor,
    second: Tensor,
    largest: Tensor | None,
    grad: Tensor,
    step: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
) -> None:
    """AdamW (arXiv:1711.05101) with bias correction; ``step`` counts the updates before this one."""
    require(largest is None and not amsgrad, "amsgrad is not modelled")
    require(param.shape == grad.shape == first.shape == second.shape, "shapes differ")
    require(first.dtype == second.dtype == param.dtype, "parameter and moments differ in dtype")
    number = float(step) + 1.0
    gradient = -grad.float() if maximize else grad.float()
    first.mul_(beta1).add_(gradient, alpha=1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = (second.float() / (1 - beta2**number)).sqrt() + eps
    updated = param.float() * (1 - lr * weight_decay) - lr * first.float() / (1 - beta1**number) / denominator
    param.copy_(updated)
