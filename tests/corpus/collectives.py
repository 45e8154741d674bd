"""Sums over ranks that are missing, that come twice, or that have another factor."""

from __future__ import annotations

from anytron.base.seeds import derive_seed
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


class GatherOfShardedWorkWithoutReduceInBackward(Fault):
    """Hidden states are gathered for a vocabulary that ranks divide, and backward each rank takes its slice, unsummed.

    The published gather is of images' embeddings over context-parallel ranks, which Anytron does not divide.
    """

    run, rule = "tp2-sp", "hf-gradients"

    @staticmethod
    @in_place_of("anytron_megatron.training.heads:gather_from_sequence_parallel_region")
    def unsummed(original, hidden, tensor_parallel_output_grad=True):
        return original(hidden, tensor_parallel_output_grad=False)


class SharedAdapterDiffersBetweenExpertRanks(Fault):
    """Adapters outside of the experts begin with each expert-parallel rank's own random numbers."""

    run, rule = "lora-ep2", "hf-gradients"

    @staticmethod
    @in_place_of("anytron_megatron.lora.adapters:_initialise")
    def own(original, name, layer, seed):
        from megatron.core import parallel_state

        rank = parallel_state.get_expert_model_parallel_rank()
        original(name, layer, seed if layer.is_grouped else derive_seed(seed, "rank", rank))


class ScaledTheWrongBuffer(Fault):
    """The sum of a rank's micro-batches is divided by the number of replicas before each gradient is added to it."""

    run, rule = "dp2-small", "hf-gradients"

    @staticmethod
    @in_place_of(f"{DDP}._make_backward_post_hook")
    def hook_of(original, self, parameter):
        add = original(self, parameter)

        def divided(*unused):
            if parameter.grad is not None:
                parameter.main_grad /= self.dp_group.size()
            add(*unused)

        return divided


class ExpertsOutputReducedTwice(Fault):
    """The output of the experts is summed over tensor-parallel ranks, which hold other tokens, once more."""

    run, rule = "tp2-moe", "hf-logits"

    @staticmethod
    @in_place_of("megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.combine_postprocess")
    def again(original, self, *arguments):
        from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

        return reduce_from_tensor_model_parallel_region(original(self, *arguments).contiguous())


class ReplicatedTowerSummedOverTensorParallelRanks(Fault):
    """The parameters of a vision tower, which each tensor-parallel rank runs in full, are marked as partial."""

    run, rule = "images-tp2", "hf-gradients"

    @staticmethod
    @in_place_of("anytron_megatron.training.trained_model:wrap_for_training")
    def wrap(original, chunks, *arguments):
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if "visual" in name:
                    parameter.sequence_parallel, parameter.average_gradients_across_tp_domain = True, False
        return original(chunks, *arguments)
