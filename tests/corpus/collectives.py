"""Sums over ranks that are missing, that come twice, or that have another factor."""

from __future__ import annotations

import torch
from torch import distributed

from tests.corpus.fault import Fault, in_place_of

DDP = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"
BUCKETS = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"


class WrapperBypassedSoNoReduction(Fault):
    """The model is called inside of its data-parallel wrapper, whose forward pass arms the reduction of gradients."""

    run, rule = "dp2", "hf-gradients"

    @staticmethod
    @in_place_of(f"{DDP}.finish_grad_sync")
    def finish(original, self, *arguments, **named):
        pass


class HookReducesADummy(Fault):
    """Gradients of norms are summed over tensor-parallel ranks in ``grad``, and the optimizer reads ``main_grad``."""

    run, rule = "tp2-sp", "hf-gradients"

    @staticmethod
    @in_place_of("megatron.core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads")
    def of_dummies(original, model, config, tp_group):
        pass


class ExpertGradientScaledByExpertParallelSize(Fault):
    """The gradients of experts are divided by the number of expert-parallel ranks."""

    run, rule = "ep2", "hf-gradients"

    @staticmethod
    @in_place_of(f"{DDP}.__init__")
    def build(original, self, config, *arguments, **named):
        original(self, config, *arguments, **named)
        for buffer in self.expert_parallel_buffers:
            for bucket in buffer.buckets:
                bucket.gradient_scaling_factor /= config.expert_model_parallel_size


class GradientDoubledForAGroupOfOne(Fault):
    """A gradient buffer whose data-parallel group has one rank is added to itself."""

    run, rule = "qwen3", "hf-gradients"

    @staticmethod
    @in_place_of(f"{BUCKETS}.start_grad_sync")
    def start(original, self, *arguments, **named):
        for bucket in self.buckets:
            if self.intra_distributed_optimizer_instance_size == 1:
                bucket.grad_data += bucket.grad_data.clone()
        return original(self, *arguments, **named)


class ScaledTheWrongBuffer(Fault):
    """What earlier micro-batches have left is divided by the data-parallel size, and the new gradient is not."""

    run, rule = "dp2", "hf-gradients"

    @staticmethod
    @in_place_of(f"{DDP}._make_backward_post_hook")
    def make_hook(original, self, param):
        hook = original(self, param)

        def scaled(*unused):
            param.main_grad.mul_(0.5)
            hook(*unused)

        return scaled


class BufferOfTheWeightGatherIsTheGradient(Fault):
    """The gradient buffer is not cleared after it was used for something else."""

    run, rule = "qwen3", "optimizer-update"

    @staticmethod
    @in_place_of(f"{DDP}.zero_grad_buffer")
    def keep(original, self):
        kept = [(buffer, buffer.grad_data.clone()) for buffer in self.buffers]
        original(self)
        for buffer, values in kept:
            buffer.grad_data.copy_(values)


class EmbeddingCopyOutsideOfItsGroup(Fault):
    """The gradients of the tied weights on the first and on the last pipeline stage are not added."""

    run, rule = "pp2-tied", "hf-gradients"

    @staticmethod
    @in_place_of("megatron.core.distributed.finalize_model_grads:_allreduce_word_embedding_grads")
    def alone(original, *arguments, **named):
        pass


class CommunicatorInheritsAnEmptyDispatch(Fault):
    """The exchange of tokens between ranks returns each rank's own."""

    run, rule = "ep2", "hf-logits"

    @staticmethod
    @in_place_of("torch.distributed:all_to_all_single")
    def keep(original, output, given, *arguments, **named):
        rows = min(len(output), len(given))
        output.zero_()
        output[:rows].copy_(given[:rows])


class ExpertsOutputReducedTwice(Fault):
    """The output of the experts, which the dispatcher has reduced already, is reduced once more."""

    run, rule = "ep2", "hf-logits"

    @staticmethod
    @in_place_of("megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.combine_postprocess")
    def combine(original, self, *arguments):
        output = original(self, *arguments)
        return Reduced.apply(output, self.ep_group)


class Reduced(torch.autograd.Function):
    """A sum over the ranks of a group."""

    @staticmethod
    def forward(ctx, values, group):
        total = values.clone()
        distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class GatherOfDuplicatedWorkSummedInBackward(Fault):
    """Every rank computes the output layer's input in full, and the backward pass adds up equal gradients."""

    run, rule = "tp2", "hf-gradients"

    @staticmethod
    @in_place_of("megatron.core.tensor_parallel.mappings:_CopyToModelParallelRegion.backward")
    def twice(original, ctx, grad_output):
        grad, *others = original(ctx, grad_output)
        return 2.0 * grad, *others


class SharedAdapterDiffersBetweenExpertRanks(Fault):
    """An adapter that all expert-parallel ranks share begins with each rank's own random numbers."""

    run, rule = "ep2-lora", "parallel-equals-single"

    @staticmethod
    @in_place_of("anytron_megatron.training.trained_model:wrap_for_training")
    def wrap(original, chunks, *arguments):
        generator = torch.Generator().manual_seed(distributed.get_rank())
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if "lora_A" in name and ".experts." not in name:
                    parameter.data.add_(0.01 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
        return original(chunks, *arguments)
