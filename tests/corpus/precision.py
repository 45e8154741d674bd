"""Numbers that are rounded where the model keeps them in float32."""

from __future__ import annotations

import torch

from anytron import hookimpl
from anytron.kernels.contract import KernelName
from anytron.kernels.fused import rms_norm
from anytron.kernels.log_prob import make_log_prob
from tests.corpus.fault import Fault, in_place_of

PROGRAMS = 128
"""Parts of a kernel that run side by side; each adds up its own rows."""


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


class RouterBiasUpdatedInHalfPrecision(Fault):
    """The bias by which experts are chosen is rounded to bfloat16 after each update."""

    run, rule, changes_a_run = "mla", "router-bias", False  # a step of 1e-3 changes hardly any choice

    @staticmethod
    @in_place_of("megatron.core.distributed.finalize_model_grads:get_updated_expert_bias")
    def rounded(original, *arguments):
        return original(*arguments).bfloat16().float()


class WeightGradientSummedInHalfPrecision(Fault):
    """The gradient of a norm's weight is added up over tokens, row by row, in the dtype of the weight."""

    run, rule = "bfloat16", "rms-norm"

    @hookimpl
    def fused_kernel(self, name, spec):
        return NormWithNarrowSum.apply if name is KernelName.RMS_NORM else None


class NormWithNarrowSum(torch.autograd.Function):
    """The neutral norm, but for the sum of its weight's gradient."""

    @staticmethod
    def forward(ctx, x, weight, eps, zero_centered):
        ctx.save_for_backward(x, weight)
        ctx.settings = eps, zero_centered
        return rms_norm(x, weight, eps, zero_centered)

    @staticmethod
    def backward(ctx, grad):
        eps, zero_centered = ctx.settings
        with torch.enable_grad():
            x, weight = (one.detach().requires_grad_() for one in ctx.saved_tensors)
            (of_x,) = torch.autograd.grad(rms_norm(x, weight, eps, zero_centered), x, grad)
        products = (grad * rms_norm(x.detach(), torch.ones_like(weight), eps, False)).reshape(-1, x.shape[-1])
        rows = -(-len(products) // PROGRAMS)
        blocks = torch.nn.functional.pad(products, (0, 0, 0, rows * PROGRAMS - len(products))).view(PROGRAMS, rows, -1)
        totals = torch.zeros_like(blocks[:, 0]) if rows else weight.new_zeros(1, len(weight))
        for row in range(rows):
            totals += blocks[:, row]
        return of_x, totals.sum(0).to(weight.dtype), None, None


class Float32GradientReductionNotPassedOn(Fault):
    """Gradients are accumulated and reduced in the dtype of the parameters."""

    run, rule = "bfloat16-small", "gradients-add-up"

    @staticmethod
    @in_place_of("anytron_megatron.training.trained_model:DistributedDataParallelConfig")
    def narrow(original, *, grad_reduce_in_fp32, **settings):
        return original(grad_reduce_in_fp32=False, **settings)
