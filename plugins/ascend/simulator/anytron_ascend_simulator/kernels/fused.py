"""RMS norm, SwiGLU, rotary embeddings, grouped products, AdamW, and primitives that torch_npu's C++ calls itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from anytron_ascend_simulator.kernels.contract import gradients, require

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def _rms_norm(x: Tensor, gamma: Tensor, epsilon: float, y: Tensor, rstd: Tensor) -> None:
    """``y = x * rstd * gamma`` with ``rstd = 1 / sqrt(mean(x^2) + epsilon)`` over gamma's dimensions."""
    axes = _axes(x, gamma)
    inverse = torch.rsqrt(x.float().square().mean(axes, keepdim=True) + epsilon)
    y.copy_(x.float() * inverse * gamma.float())
    rstd.copy_(inverse.view_as(rstd))


def _rms_norm_grad(dy: Tensor, x: Tensor, rstd: Tensor, gamma: Tensor, dx: Tensor, dgamma: Tensor) -> None:
    """The gradient from the *given* ``rstd``, as the operator does it (it has no epsilon)."""
    axes = _axes(x, gamma)
    require(dy.shape == x.shape, f"dy {tuple(dy.shape)} and x {tuple(x.shape)} differ in shape")
    wide, inverse = x.float(), rstd.float()
    normalised = wide * inverse
    scaled = dy.float() * gamma.float()
    dx.copy_(inverse * (scaled - normalised * (scaled * normalised).mean(axes, keepdim=True)))
    dgamma.copy_((dy.float() * normalised).sum_to_size(gamma.shape))


def _axes(x: Tensor, gamma: Tensor) -> tuple[int, ...]:
    """The dimensions of ``x`` that ``gamma`` has."""
    require(
        x.shape[x.dim() - gamma.dim() :] == gamma.shape,
        f"gamma {tuple(gamma.shape)} is not the end of x's shape {tuple(x.shape)}",
    )
    return tuple(range(-gamma.dim(), 0))


def _gated(x: Tensor, dim: int) -> Tensor:
    """``silu(A) * B`` of the halves of ``x`` along ``dim`` (torch_npu's documentation of npu_swiglu)."""
    require(x.size(dim) % 2 == 0, f"dimension {dim} of x {tuple(x.shape)} is not even")
    first, second = x.chunk(2, dim)
    return torch.nn.functional.silu(first) * second


def _swiglu(x: Tensor, dim: int, y: Tensor) -> None:
    y.copy_(_gated(x.float(), dim))


def _swiglu_grad(dy: Tensor, x: Tensor, dim: int, dx: Tensor) -> None:
    dx.copy_(gradients(lambda given: _gated(given, dim), (x,), dy)[0])


HALF, INTERLEAVED = 0, 1
"""Modes of ``aclnnRotaryPositionEmbedding``."""


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, mode: int) -> Tensor:
    """Rotate as ``npu_rotary_mul`` does."""
    if mode == HALF:
        first, second = x.chunk(2, -1)
        rotated = torch.cat((-second, first), -1)
    else:
        rotated = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * cos + rotated * sin


def _check_rotary(x: Tensor, cos: Tensor, sin: Tensor, mode: int) -> None:
    require(mode in (HALF, INTERLEAVED), f"mode is {mode}, not 0 (half) or 1 (interleaved)")
    require(x.dim() == 4, f"x has {x.dim()} dimensions, not 4")
    require(x.size(-1) % 2 == 0 and x.size(-1) <= 896, f"head size is {x.size(-1)}, but must be even and at most 896")
    require(cos.shape == sin.shape, f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} differ")
    require(cos.size(-1) == x.size(-1), f"cos has head size {cos.size(-1)}, but x has {x.size(-1)}")
    fits = all(small in (1, large) for small, large in zip(cos.shape, x.shape, strict=True))
    require(fits, f"cos {tuple(cos.shape)} does not broadcast to x {tuple(x.shape)}")


def _rotary(x: Tensor, cos: Tensor, sin: Tensor, mode: int, y: Tensor) -> None:
    _check_rotary(x, cos, sin, mode)
    y.copy_(_rotated(x.float(), cos.float(), sin.float(), mode))


def _rotary_grad(
    dy: Tensor, cos: Tensor, sin: Tensor, x: Tensor | None, mode: int, dx: Tensor, dcos: Tensor, dsin: Tensor
) -> None:
    # Without x only dx is wanted; it does not depend on x.
    given = dy if x is None else x
    _check_rotary(given, cos, sin, mode)
    found = gradients(lambda a, b, c: _rotated(a, b, c, mode), (given, cos, sin), dy)
    dx.copy_(found[0])
    if x is not None:
        dcos.copy_(found[1])
        dsin.copy_(found[2])


ROWS, REDUCED = 0, 2
"""Values of ``group_type``."""
SUMS, COUNTS = 0, 1
"""Values of ``group_list_type``."""


def _grouped_matmul(*arguments: Any) -> None:
    """Multiply rows in groups, each with its own weight; or the reduced dimension in groups (``npu_grouped_matmul``).

    Source: torch_npu's documentation of ``npu_grouped_matmul`` and op-plugin's GroupedMatmulKernelNpuOpApi.cpp.
    Modelled is what training uses: one ``x``, one weight ``[G, K, N]`` or G weights ``[K, N]`` (for the reduced
    dimension one ``[K, N]``), one output, no quantisation, bias or activation.
    """
    x, weight, *unmodelled = arguments[:8]
    groups, *activation = arguments[8:12]
    split_item, group_type, list_type, activation_type = arguments[12:16]
    outputs = arguments[-3]
    require(not any(unmodelled) and not any(activation) and activation_type == 0, "only plain products are modelled")
    require(len(x) == 1 and len(outputs) == 1, "only one x and one output are modelled")
    if len(weight) > 1:  # "single, multiple, single" in the documentation
        require(group_type == ROWS, f"several weights belong to group_type 0, not {group_type}")
        require(all(matrix.dim() == 2 for matrix in weight), "each of several weights is [K, N]")
        weight = [torch.stack(weight)]
    require(split_item in (2, 3), f"split_item {split_item} makes several outputs; 2 and 3 make one")
    require(list_type in (SUMS, COUNTS), f"group_list_type is {list_type}, not 0 (sums) or 1 (counts)")
    require(groups is not None and groups.dtype == torch.int64, "group_list must be an int64 tensor")
    require(x[0].dtype == weight[0].dtype, f"x is {x[0].dtype}, but weight is {weight[0].dtype}")
    counts = groups.tolist() if list_type == COUNTS else groups.diff(prepend=groups.new_zeros(1)).tolist()
    require(min(counts) >= 0, f"group_list {groups.tolist()} is not ascending")
    compute = {ROWS: _rows, REDUCED: _reduced}.get(group_type)
    require(compute is not None, f"group_type {group_type} is not modelled (0, rows, and 2, reduced dimension, are)")
    assert compute is not None
    compute(x[0].float(), weight[0].float(), counts, outputs[0])


def _rows(x: Tensor, weight: Tensor, counts: list[int], output: Tensor) -> None:
    """``[T, K]`` by ``[G, K, N]`` -> ``[T, N]``."""
    require(
        weight.dim() == 3 and len(counts) == weight.size(0), f"{len(counts)} groups, but weight {tuple(weight.shape)}"
    )
    require(x.size(-1) == weight.size(1), f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not match")
    require(sum(counts) <= x.size(0), f"group_list asks for {sum(counts)} rows, but x has {x.size(0)}")
    output.zero_()
    begin = 0
    for count, matrix in zip(counts, weight, strict=True):
        output[begin : begin + count].copy_(x[begin : begin + count] @ matrix)
        begin += count


def _reduced(x: Tensor, weight: Tensor, counts: list[int], output: Tensor) -> None:
    """``[M, T]`` by ``[T, N]`` -> ``[G, M, N]``."""
    require(x.size(1) == weight.size(0), f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not match")
    require(sum(counts) <= x.size(1), f"group_list asks for {sum(counts)} columns, but x has {x.size(1)}")
    begin = 0
    for index, count in enumerate(counts):
        output[index].copy_(x[:, begin : begin + count] @ weight[begin : begin + count])
        begin += count


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
    """``_fused_adamw_``: AdamW (arXiv:1711.05101) with bias correction; ``step`` counts the updates before this one."""
    require(largest is None and not amsgrad, "amsgrad is not modelled")
    require(param.shape == grad.shape == first.shape == second.shape, "parameter, gradient and moments differ in shape")
    require(first.dtype == second.dtype == param.dtype, "parameter and moments differ in dtype")
    number = float(step) + 1.0
    gradient = -grad.float() if maximize else grad.float()
    first.mul_(beta1).add_(gradient, alpha=1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = (second.float() / (1 - beta2**number)).sqrt() + eps
    updated = param.float() * (1 - lr * weight_decay) - lr * first.float() / (1 - beta1**number) / denominator
    param.copy_(updated)


def _pad(source: Tensor, padding: list[int], value: Any, target: Tensor) -> None:
    target.copy_(torch.nn.functional.pad(source, padding, value=value))


KERNELS: dict[str, Callable[..., Any]] = {
    "aclnnRmsNorm": _rms_norm,
    "aclnnRmsNormGrad": _rms_norm_grad,
    "aclnnSwiGlu": _swiglu,
    "aclnnSwiGluGrad": _swiglu_grad,
    "aclnnRotaryPositionEmbedding": _rotary,
    "aclnnRotaryPositionEmbeddingGrad": _rotary_grad,
    "aclnnGroupedMatmulV4": _grouped_matmul,
    "aclnnApplyAdamWV2": _adamw,
    "aclnnInplaceFillScalar": torch.Tensor.fill_,
    "aclnnInplaceZero": torch.Tensor.zero_,
    "aclnnInplaceOne": lambda target: target.fill_(1),
    "aclnnInplaceCopy": torch.Tensor.copy_,
    "aclnnCast": lambda source, _dtype, target: target.copy_(source),
    "aclnnConstantPadNd": _pad,
}
