"""Kernels that return or store the wrong numbers."""

from __future__ import annotations

import torch

from anytron import hookimpl
from anytron.kernels.attention import make_attention
from anytron.kernels.contract import KernelName
from anytron.kernels.fused import adam, rope
from anytron.kernels.log_prob import make_log_prob
from tests.corpus.fault import Fault


class ValueGradientWrongForSlicesOfAFusedProjection(Fault):
    """The backward pass reads the storage of a value that is a slice as if the value were contiguous."""

    run, rule = "qwen3", "attention-strides"

    @hookimpl
    def attention_kernel(self, spec):
        attend = make_attention(spec)

        class Attended(torch.autograd.Function):
            @staticmethod
            def forward(ctx, query, key, value, call):
                ctx.call = call
                ctx.save_for_backward(query, key, value)
                return attend(query, key, value, call)

            @staticmethod
            def backward(ctx, grad):
                query, key, value = ctx.saved_tensors
                dense = torch.empty(value.shape, device="meta").stride()
                with torch.enable_grad():
                    leaves = [one.detach().requires_grad_() for one in (query, key)]
                    read = value.detach().as_strided(value.shape, dense).requires_grad_()
                    out = attend(*leaves, read, ctx.call)
                return (*torch.autograd.grad(out, (*leaves, read), grad), None)

        return Attended.apply


class UpstreamGradientReadAsAScalar(Fault):
    """The backward pass of the log-prob kernel multiplies all rows by the first token's gradient."""

    run, rule = "qwen3", "hf-gradients"

    @hookimpl
    def log_prob_kernel(self, spec):
        score = make_log_prob(spec)
        return lambda *tensors: tuple(FirstGradient.apply(one) for one in score(*tensors))


class FirstGradient(torch.autograd.Function):
    """The same values; each gets the first one's gradient."""

    @staticmethod
    def forward(ctx, values):
        return values.view_as(values)

    @staticmethod
    def backward(ctx, grad):
        return grad.flatten()[:1].expand_as(grad)


class OutputBoundToANewName(Fault):
    """The optimizer's kernel computes new second moments, and leaves the tensors that it was given as they are."""

    run, rule = "qwen3", "optimizer-update"

    @hookimpl
    def fused_kernel(self, name, spec):
        return into_copies if name is KernelName.ADAM else None


def into_copies(parameters, gradients, first, second, **settings):
    return adam(parameters, gradients, first, [one.clone() for one in second], **settings)


class HalfOfTheRotatedHeadNotStored(Fault):
    """The rotary kernel writes the first half of what it rotates, and leaves the second as it came in."""

    run, rule = "qwen3", "hf-logits"

    @hookimpl
    def fused_kernel(self, name, spec):
        return half_stored if name is KernelName.ROPE else None


def half_stored(x, freqs, interleaved):
    half = freqs.shape[-1] // 2
    return torch.cat([rope(x, freqs, interleaved)[..., :half], x[..., half:]], -1)
