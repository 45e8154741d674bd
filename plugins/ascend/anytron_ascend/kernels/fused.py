"""torch_npu's fused operators with the signatures of :mod:`anytron.kernels.fused`."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anytron.kernels import KernelName
from anytron.kernels import fused as neutral

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MAX_ROTARY_SIZE = 896
"""Largest head dimension that ``npu_rotary_mul`` rotates (its documentation)."""
_ROWS, _REDUCED = 0, 2
"""``group_type`` of ``npu_grouped_matmul``: which dimension the groups divide, rows or the reduced one."""
_ONE_OUTPUT = 3
"""``split_item``: all groups in one output tensor."""
_COUNTS = 1
"""``group_list_type``: the list holds counts, not their sums."""


def fused_kernel(name: KernelName) -> Callable[..., Any] | None:
    """Return torch_npu's kernel for a name; None if it has none."""
    return _KERNELS.get(name)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """As :func:`anytron.kernels.fused.rms_norm`; computed in float32 inside, cast once at the end."""
    import torch_npu

    normalised: Tensor = torch_npu.npu_rms_norm(x, 1 + weight if zero_centered else weight, eps)[0]
    return normalised


def swiglu(x: Tensor) -> Tensor:
    """As :func:`anytron.kernels.fused.swiglu`."""
    import torch_npu

    gated: Tensor = torch_npu.npu_swiglu(x, -1)
    return gated


def rope(x: Tensor, freqs: Tensor, interleaved: bool) -> Tensor:
    """As :func:`anytron.kernels.fused.rope`.

    The operator takes four dimensions and cosines that broadcast to them. For heads that are larger than it supports,
    :func:`anytron.kernels.fused.rope` computes.
    """
    import torch_npu

    size = freqs.shape[-1]
    if size > MAX_ROTARY_SIZE:
        return neutral.rope(x, freqs, interleaved)
    turned, passed = x[..., :size], x[..., size:]
    angles = _four_dimensions(freqs.expand(*[1] * (x.dim() - freqs.dim()), *freqs.shape))
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    mode = "interleave" if interleaved else "half"
    rotated = torch_npu.npu_rotary_mul(_four_dimensions(turned), cos, sin, mode).view_as(turned)
    return torch.cat((rotated, passed), dim=-1) if passed.shape[-1] else rotated


def _four_dimensions(tensor: Tensor) -> Tensor:
    """Put dimensions of 1 in front, or join leading ones."""
    missing = 4 - tensor.dim()
    if missing >= 0:
        return tensor.reshape(*[1] * missing, *tensor.shape)
    return tensor.flatten(0, -missing)


class _GroupedMatmul(torch.autograd.Function):
    """``npu_grouped_matmul`` with the gradients that torch_npu lacks; both are grouped products too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Tensor, *weights: Tensor) -> Tensor:
        stacked = torch.stack(weights)  # [G, N, K]
        ctx.save_for_backward(x, counts, stacked)
        return _product(x, stacked.transpose(1, 2), counts, _ROWS)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, counts, stacked = ctx.saved_tensors
        grad = grad.contiguous()
        for_x = _product(grad, stacked, counts, _ROWS) if ctx.needs_input_grad[0] else None
        for_weights: Sequence[Tensor | None] = [None] * len(stacked)
        if any(ctx.needs_input_grad[2:]):
            for_weights = _product(grad.t(), x, counts, _REDUCED).unbind()  # [G, N, K]
        return (for_x, None, *for_weights)


def _product(x: Tensor, weight: Tensor, counts: Tensor, group_type: int) -> Tensor:
    import torch_npu

    product: Tensor = torch_npu.npu_grouped_matmul(
        [x],
        [weight],
        group_list=counts,
        split_item=_ONE_OUTPUT,
        group_type=group_type,
        group_list_type=_COUNTS,
    )[0]
    return product


def grouped_mm(x: Tensor, weights: Sequence[Tensor], splits: Sequence[int]) -> Tensor:
    """As :func:`anytron.kernels.fused.grouped_mm`."""
    counts = torch.tensor(list(splits), dtype=torch.int64, device=x.device)
    product: Tensor = _GroupedMatmul.apply(x, counts, *weights)  # type: ignore[no-untyped-call]
    return product


def adam(
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

    The operator is AdamW with bias correction on float32. For other forms of Adam and for other dtypes,
    :func:`anytron.kernels.fused.adam` computes.
    """
    settings: dict[str, Any] = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    plain = (decoupled or weight_decay == 0.0) and bias_correction
    if not plain or any(tensor.dtype != torch.float32 for tensor in (*params, *grads)):
        form: dict[str, Any] = {"step": step, "decoupled": decoupled, "bias_correction": bias_correction}
        neutral.adam(params, grads, exp_avgs, exp_avg_sqs, **form, **settings)
        return
    steps = [torch.full((), float(step), device=param.device) for param in params]
    torch._fused_adamw_(params, grads, exp_avgs, exp_avg_sqs, [], steps, amsgrad=False, maximize=False, **settings)


_KERNELS: Mapping[KernelName, Callable[..., Any]] = MappingProxyType(
    {
        KernelName.RMS_NORM: rms_norm,
        KernelName.SWIGLU: swiglu,
        KernelName.ROPE: rope,
        KernelName.GROUPED_MM: grouped_mm,
        KernelName.ADAM: adam,
    }
)
