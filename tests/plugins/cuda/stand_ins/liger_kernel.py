"""Liger's functions by their signatures, in float64: they refuse what the library refuses.

liger-kernel 0.8.5: ``ops/rms_norm.py`` (``LigerRMSNormFunction``), ``ops/swiglu.py``
(``LigerFusedGateUpSiLUMulFunction``), ``ops/utils.py`` (``calculate_settings``, ``torch_to_triton_dtype``).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

LARGEST_ROW = 65536
TRITON_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def refuse_what_triton_cannot(x: Tensor, size: int) -> None:
    if size > LARGEST_ROW:
        raise RuntimeError(f"Cannot launch Triton kernel since n = {size} exceeds the recommended Triton blocksize")
    if x.dtype not in TRITON_TYPES:
        raise KeyError(x.dtype)


def gradients(function, inputs, grad: Tensor):
    with torch.enable_grad():
        leaves = [tensor.detach().double().requires_grad_() for tensor in inputs]
        found = torch.autograd.grad(function(*leaves), leaves, grad.double())
    return [one.to(tensor.dtype) for one, tensor in zip(found, inputs, strict=True)]


class LigerRMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):  # noqa: N803
        assert casting_mode in ("llama", "gemma", "none"), f"Invalid casting mode: {casting_mode}"
        assert X.shape[-1] == W.shape[0], "Incompatible hidden size dimension"
        refuse_what_triton_cannot(X, X.shape[-1])

        def norm(x: Tensor, weight: Tensor) -> Tensor:
            normalised = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
            if casting_mode == "llama":
                normalised = normalised.to(X.dtype).double()
            return normalised * (offset + weight)

        ctx.norm, ctx.in_place = norm, in_place
        ctx.save_for_backward(X, W)
        return norm(X.double(), W.double()).to(X.dtype)

    @staticmethod
    def backward(ctx, dY):  # noqa: N803
        dx, dw = gradients(ctx.norm, ctx.saved_tensors, dY)
        return dY.copy_(dx) if ctx.in_place else dx, dw, None, None, None, None, None


class LigerFusedGateUpSiLUMulFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, in_place=False):
        shape = y.shape
        if shape[-1] % 2 != 0:
            raise ValueError(f"fused gate-up input must have an even trailing dim; got {shape[-1]}.")
        y = y.contiguous().view(-1, shape[-1])  # what is saved, and so the gradient, is a matrix
        refuse_what_triton_cannot(y, y.shape[-1] // 2)

        def gated(x: Tensor) -> Tensor:
            gate, up = x.chunk(2, -1)
            return functional.silu(gate).to(y.dtype).double() * up

        ctx.gated, ctx.in_place = gated, in_place
        ctx.save_for_backward(y)
        return gated(y.double()).to(y.dtype).view(*shape[:-1], shape[-1] // 2)

    @staticmethod
    def backward(ctx, dc):
        (y,) = ctx.saved_tensors
        (dy,) = gradients(ctx.gated, [y], dc.reshape(-1, y.shape[-1] // 2))
        return y.copy_(dy) if ctx.in_place else dy, None
