"""Numbers that are rounded where the model keeps them in float32."""

from __future__ import annotations

import torch

from anytron import hookimpl
from anytron.kernels.contract import KernelName
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


class RouterBiasUpdatedInHalfPrecision(Fault):
    """The router's bias is rounded to bfloat16 after each update, so that an update of 1e-3 is lost."""

    run, rule = "mla", "export-equals-import"

    @staticmethod
    @in_place_of("megatron.core.transformer.moe.moe_utils:get_updated_expert_bias")
    @in_place_of("megatron.core.distributed.finalize_model_grads:get_updated_expert_bias")
    def rounded(original, *arguments, **named):
        return original(*arguments, **named).bfloat16().float()


class TrueClassGradientRoundedBeforeTheSubtraction(Fault):
    """The softmax is rounded to bfloat16 before one is subtracted at the right token."""

    run, rule = "qwen3", "hf-gradients"

    @hookimpl
    def log_prob_kernel(self, spec):
        score = make_log_prob(spec)

        def scored(hidden, weight, labels, temperature, group):
            return score(RoundedBackward.apply(hidden), weight, labels, temperature, group)

        return scored


class WeightGradientSummedInHalfPrecision(Fault):
    """The gradient of a norm's weight is summed over tokens in bfloat16."""

    run, rule = "qwen3", "hf-gradients"

    @hookimpl
    def fused_kernel(self, name, spec):
        return with_rounded_sum if name is KernelName.RMS_NORM else None


def with_rounded_sum(x, weight, eps, zero_centered):
    return rms_norm(x, RoundedBackward.apply(weight), eps, zero_centered)


class Float32ResidualCastDown(Fault):
    """The residual is rounded to bfloat16 before the addition."""

    run, rule = "qwen3", "hf-logits"

    @staticmethod
    @in_place_of("megatron.core.fusions.fused_bias_dropout:_bias_dropout_add_func")
    def rounded(original, x_with_bias, residual, prob, training):
        return original(x_with_bias, residual.bfloat16().to(residual.dtype), prob, training)


class Float32GradientReductionNotPassedOn(Fault):
    """Gradients are accumulated and reduced in bfloat16."""

    run, rule = "bfloat16", "hf-gradients"

    @staticmethod
    @in_place_of("megatron.core.distributed.distributed_data_parallel_config:DistributedDataParallelConfig.__init__")
    def build(original, self, *arguments, **named):
        original(self, *arguments, **{**named, "grad_reduce_in_fp32": False})
