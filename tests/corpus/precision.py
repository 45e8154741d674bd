"""Numbers that are rounded where the model keeps them in float32."""

from __future__ import annotations

import torch

from anytron import hookimpl
from anytron.kernels.fused import rms_norm
from anytron.kernels.log_prob import make_log_prob
from tests.corpus.fault import Fault, in_place_of


class RoundedBackward(torch.autograd.Function):
    """The same values, and a gradient that is rounded to bfloat16."""

    @staticmethod
    def forward(ctx, values):
        return values.view_as(values)

    @staticmethod
    def backward(ctx, grad):
        return grad.bfloat16().to(grad.dtype)


class TrueClassGradientRoundedBeforeTheSubtraction(Fault):
    """The softmax is rounded to bfloat16 before one is subtracted at the right token."""

    run, rule = "qwen3", "hf-gradients"

    @hookimpl
    def log_prob_kernel(self, spec):
        score = make_log_prob(spec)

        def scored(hidden, weight, labels, temperature, group):
            return score(RoundedBackward.apply(hidden), weight, labels, temperature, group)

        return scored


def with_rounded_sum(x, weight, eps, zero_centered):
    return rms_norm(x, RoundedBackward.apply(weight), eps, zero_centered)


class Float32ResidualCastDown(Fault):
    """The residual is rounded to bfloat16 before the addition."""

    run, rule = "qwen3", "hf-logits"

    @staticmethod
    @in_place_of("megatron.core.fusions.fused_bias_dropout:_bias_dropout_add_func")
    def rounded(original, x_with_bias, residual, prob, training):
        return original(x_with_bias, residual.bfloat16().to(residual.dtype), prob, training)
