"""Fused kernels of libraries and of torch: SwiGLU, RMS norm, rotary embeddings, the products of experts, Adam."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from anytron.kernels import fused as neutral

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


LARGEST_HEAD = 256
"""``flash_attn/ops/triton/rotary.py``: "Only support headdim <= 256"."""

MAX_GROUPS = 1023
"""``torch/_native/ops/foreach_mm/impl.py``: "bf16 kernel requires group_count < 1024"."""

_ALIGNMENT = 16
"""Rows must be a multiple of this many bytes (``aten/src/ATen/native/GroupedMMUtils.h``)."""


def liger_swiglu(x: Tensor) -> Tensor:
    """As :func:`anytron.kernels.fused.swiglu`; keeps only the input for the backward pass.

    ``LigerFusedGateUpSiLUMulFunction`` (``liger_kernel/ops/swiglu.py``) takes Megatron's order of the halves, in one
    tensor. Its gradient is a matrix for any shape of the input (0.8.5, ``swiglu_fused_gate_up_backward``), so the
    input is passed as a matrix. ``in_place`` would write the gradient over the input, which recomputation may still
    need.
    """
    from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction

    in_place = False
    size = x.shape[-1]
    gated: Tensor = LigerFusedGateUpSiLUMulFunction.apply(x.reshape(-1, size), in_place)
    return gated.view(*x.shape[:-1], size // 2)


def liger_rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """As :func:`anytron.kernels.fused.rms_norm`, and in its order of casts.

    ``LigerRMSNormFunction`` (``liger_kernel/ops/rms_norm.py``) has both orders: ``llama`` casts to the input's type
    and then multiplies, ``gemma`` computes all in float32. By default it writes the input's gradient over the
    output's, which another layer may hold.
    """
    from liger_kernel.ops import LigerRMSNormFunction

    if x.dtype != weight.dtype:  # its result has the type of x, not of both
        return neutral.rms_norm(x, weight, eps, zero_centered)
    offset, casts, in_place = (1.0, "gemma", False) if zero_centered else (0.0, "llama", False)
    normalised: Tensor = LigerRMSNormFunction.apply(x, weight, eps, offset, casts, in_place)
    return normalised


def torch_rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """As :func:`anytron.kernels.fused.rms_norm`, but multiplied by the weight in float32 and cast once, not twice.

    torch has one kernel for an input and a weight of one type; the factor ``1 + weight`` needs another type.
    """
    if zero_centered or x.dtype != weight.dtype:
        return neutral.rms_norm(x, weight, eps, zero_centered)
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def flash_attn_rope(x: Tensor, freqs: Tensor, interleaved: bool) -> Tensor:
    """As :func:`anytron.kernels.fused.rope`, for angles that all heads share; rounded once, from float32.

    ``apply_rotary_emb`` (``flash_attn/layers/rotary.py``) takes ``[1, N, H, D]`` and for each of the N tokens half of
    the cosines, ``[N, R / 2]``, in the type of ``x``: so packed sequences and batches are one call. Angles that differ
    by head, and heads that are longer than it supports, are left to the reference kernel.
    """
    from flash_attn.layers.rotary import apply_rotary_emb

    heads, size = x.shape[-2:]
    shared = x.dim() > 2 and freqs.dim() > 1 and freqs.shape[-2] == 1
    if not shared or size > LARGEST_HEAD:
        return neutral.rope(x, freqs, interleaved)
    once = freqs[..., 0, ::2] if interleaved else freqs[..., 0, : freqs.shape[-1] // 2]
    angles = once.expand(*x.shape[:-2], -1).reshape(-1, once.shape[-1])
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    rotated: Tensor = apply_rotary_emb(x.reshape(1, -1, heads, size), cos, sin, interleaved=interleaved)
    return rotated.view(x.shape)


def torch_grouped_mm(x: Tensor, weights: Sequence[Tensor], splits: Sequence[int]) -> Tensor:
    """As :func:`anytron.kernels.fused.grouped_mm`.

    Operands that torch's kernel does not support (rows that are not a multiple of 16 bytes; no rows at all; several
    dtypes; more than :data:`MAX_GROUPS` groups) are left to the reference kernel.
    """
    elements = _ALIGNMENT // x.element_size()
    fits = all(size % elements == 0 for size in weights[0].shape)
    if not fits or not len(x) or len(weights) > MAX_GROUPS or any(weight.dtype != x.dtype for weight in weights):
        return neutral.grouped_mm(x, weights, splits)
    product: Tensor = _GroupedProduct.apply(x.contiguous(), splits, *weights)  # type: ignore[no-untyped-call]
    return product


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

    torch's operators always correct the bias and need tensors of one type; other cases use the reference kernel. They
    read the step number from a tensor for each parameter, and all parameters can share one tensor.
    """
    settings: dict[str, Any] = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    if not bias_correction or any(tensor.dtype != torch.float32 for tensor in (*params, *grads)):
        form: dict[str, Any] = {"step": step, "decoupled": decoupled, "bias_correction": bias_correction}
        neutral.adam(params, grads, exp_avgs, exp_avg_sqs, **form, **settings)
        return
    operator = torch._fused_adamw_ if decoupled else torch._fused_adam_
    steps = [torch.full((), float(step), device=params[0].device)] * len(params)
    operator(params, grads, exp_avgs, exp_avg_sqs, [], steps, amsgrad=False, maximize=False, **settings)


class _GroupedProduct(torch.autograd.Function):
    """Products with stacked weights that are not kept: the backward pass stacks them once more.

    torch's own gradient would keep the stack of every layer. On Blackwell it would also give an expert without rows
    what another one has left in the accumulator (pytorch #172439): no group of the weights' gradients is empty here.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: Sequence[int], *weights: Tensor) -> Tensor:
        ends = _ends(splits, x.device)
        ctx.splits = splits
        ctx.save_for_backward(x, ends, *weights)
        return _product(x, torch.stack(weights).transpose(1, 2), ends)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        for_x = _product(grad, torch.stack(weights), ends) if ctx.needs_input_grad[0] else None
        for_weights: Sequence[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[2:]):
            filled = [rows for rows in ctx.splits if rows]
            ends = ends if len(filled) == len(weights) else _ends(filled, x.device)
            products = iter(_product(grad.t(), x, ends))  # [filled groups, N, K]
            for_weights = [
                next(products) if rows else torch.zeros_like(weight)
                for rows, weight in zip(ctx.splits, weights, strict=True)
            ]
        return (for_x, None, *for_weights)


def _ends(splits: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list(accumulate(splits)), dtype=torch.int32, device=device)


def _product(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """Multiply groups of rows of ``x`` with a matrix each, or groups of its columns with as many rows of ``y``."""
    public = getattr(functional, "grouped_mm", None)  # from torch 2.10 on
    product: Tensor = torch._grouped_mm(x, y, offs=ends) if public is None else public(x, y, offs=ends)
    return product
