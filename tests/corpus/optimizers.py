"""Gradient norms, clipping and optimizer states that are not those of the whole model."""

from __future__ import annotations

import math

import torch
from torch import distributed

from tests.corpus.fault import Fault, in_place_of

NORM = "megatron.core.optimizer.optimizer:get_grad_norm_fp32"
MAIN_GRADS = "megatron.core.optimizer.optimizer:MegatronOptimizer.get_main_grads_for_grad_norm"
WRAP = "anytron_megatron.training.trained_model:wrap_for_training"


class GradientNormZeroSoNoClipping(Fault):
    """The norm is read from an attribute that the parameters lack, and is zero."""

    run, rule = "qwen3", "optimizer-update"

    @staticmethod
    @in_place_of(NORM)
    def zero(original, grads_for_norm, *arguments, **named):
        return original([], *arguments, **named)


class EachChainedOptimizerClipsByItsPart(Fault):
    """Dense and expert parameters are clipped by the norms of their own gradients."""

    run, rule = "moe", "optimizer-update"

    @staticmethod
    @in_place_of("anytron_megatron.training.trained_model:step_if_finite")
    def step(original, optimizer):
        optimizer.prepare_grads()
        norms = []
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            norms.append(float(part.get_grad_norm()))
            part.clip_grad_norm(part.config.clip_grad)
        optimizer.step_with_ready_grads()
        return math.sqrt(sum(norm**2 for norm in norms))


class ExpertShardsMissingFromTheNorm(Fault):
    """Experts that tensor parallelism splits are not marked as split, so that one rank's part enters the norm."""

    run, rule = "tp2-moe", "optimizer-update"

    @staticmethod
    @in_place_of(WRAP)
    def wrap(original, chunks, *arguments):
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if ".experts." in name:
                    parameter.tensor_model_parallel = False
        return original(chunks, *arguments)


class ReplicatedGradientsCountedOncePerTensorParallelRank(Fault):
    """Replicated weights are marked as split over tensor-parallel ranks."""

    run, rule = "tp2", "optimizer-update"

    @staticmethod
    @in_place_of(WRAP)
    def wrap(original, chunks, *arguments):
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.tensor_model_parallel = True
        return original(chunks, *arguments)


class SyntheticFirstStepCounts(Fault):
    """The optimizer's state is made by a step with gradients of zero, which decays weights and counts."""

    run, rule = "qwen3", "optimizer-update"

    @staticmethod
    @in_place_of("anytron_megatron.training.trained_model:build_optimizer")
    def build(original, *arguments, **named):
        built = original(*arguments, **named)
        built[0].step()
        return built


class OffloadedMasterWeightsNotRefreshed(Fault):
    """The optimizer's float32 copies keep the random values that the model had before its weights were loaded."""

    run, rule = "bfloat16", "optimizer-update"

    @staticmethod
    @in_place_of("anytron_megatron.training.trained_model:build_optimizer")
    def build(original, *arguments, **named):
        optimizer, scheduler = original(*arguments, **named)
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.data.normal_(std=0.02)
        return optimizer, scheduler


class CheckpointActiveAfterTheFirstStepOnly(Fault):
    """The weights go into the optimizer's copies, and the first forward pass computes with initial ones."""

    run, rule = "bfloat16", "export-equals-import"

    @staticmethod
    @in_place_of("anytron_megatron.training.trained_model:build_optimizer")
    def build(original, *arguments, **named):
        built = original(*arguments, **named)
        for wrapped in arguments[1]:
            for parameter in wrapped.parameters():
                parameter.data.normal_(std=0.02)
        return built


def summed(values, group=None):
    total = torch.tensor(float(values))
    distributed.all_reduce(total, group=group)
    return total.item()


class UnreducedPartsInANonlinearReduction(Fault):
    """The norm of each rank's part is taken, and these norms are added."""

    run, rule = "tp2", "optimizer-update"

    @staticmethod
    @in_place_of(NORM)
    def sum_of_norms(original, grads_for_norm, *arguments, grad_stats_parallel_group=None, **named):
        own = math.sqrt(sum(float(one.float().square().sum()) for one in grads_for_norm))
        return summed(own, grad_stats_parallel_group)
