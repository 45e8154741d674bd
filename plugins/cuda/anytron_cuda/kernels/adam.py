"""Adam over all tensors in a few kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from anytron.kernels import fused as neutral

if TYPE_CHECKING:
    from torch import Tensor


def torch_adam(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction: bool,
) -> None:
    """As :func:`anytron.kernels.fused.adam`.

    torch's operators correct the bias, and take tensors of one type; what else is asked for takes the reference
    kernel. They read the number of the step from a tensor for each parameter, which may be one for all.
    """
    settings: dict[str, Any] = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    if not bias_correction or any(tensor.dtype != torch.float32 for tensor in (*params, *grads)):
        form: dict[str, Any] = {"step": step, "decoupled": decoupled, "bias_correction": bias_correction}
        neutral.adam(params, grads, exp_avgs, exp_avg_sqs, **form, **settings)
        return
    operator = torch._fused_adamw_ if decoupled else torch._fused_adam_
    steps = [torch.full((), float(step), device=params[0].device)] * len(params)
    operator(params, grads, exp_avgs, exp_avg_sqs, [], steps, amsgrad=False, maximize=False, **settings)
