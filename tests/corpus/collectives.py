"""Sums over ranks that are missing, that come twice, or that have another factor."""

from __future__ import annotations

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


class GatherOfDuplicatedWorkSummedInBackward(Fault):
    """Every rank computes the output layer's input in full, and the backward pass adds up equal gradients."""

    run, rule = "tp2-whole", "hf-gradients"

    @staticmethod
    @in_place_of("megatron.core.tensor_parallel.mappings:_CopyToModelParallelRegion.backward")
    def twice(original, ctx, grad_output):
        grad, *others = original(ctx, grad_output)
        return 2.0 * grad, *others
