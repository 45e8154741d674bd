"""One rank of Megatron's ``MoELayer`` on two expert-parallel ranks, with and without ``moe_permute_fusion``."""

from functools import partial

import torch
import torch.distributed as dist

from anytron.base.traits import ParallelSizes
from anytron.train import open_device_stack

HIDDEN, EXPERTS = 8, 4


def outputs(dispatcher, *, fused, capacity):
    """The layer's output and the gradients of its weights, on tokens that differ from rank to rank."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_grouped_gemm=True,
        moe_router_topk=2,
        moe_token_dispatcher_type=dispatcher,
        moe_permute_fusion=fused,
        expert_model_parallel_size=2,
        add_bias_linear=False,
        **capacity,
    )
    spec = get_gpt_layer_with_transformer_engine_spec(EXPERTS, moe_grouped_gemm=True)
    mlp = spec.submodules.mlp  # a partial function from 0.18 on
    modules = mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
    layer = MoELayer(config, modules, layer_number=1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randn(5, 3, HIDDEN, generator=generator).requires_grad_()
    output, _ = layer(tokens)
    output.square().sum().backward()
    return [output.detach(), tokens.grad, *(weight.grad for weight in layer.parameters())]


def main():
    torch.set_num_threads(1)
    with open_device_stack("cpu") as stack:
        from anytron_megatron import join

        join(stack, ParallelSizes(data=2, expert=2))
        for dispatcher, capacity in (
            ("alltoall", {}),
            ("allgather", {}),
            ("alltoall", {"moe_expert_capacity_factor": 0.5}),
            ("alltoall", {"moe_expert_capacity_factor": 0.5, "moe_pad_expert_input_to_capacity": True}),
        ):
            plain, fused = (outputs(dispatcher, fused=fused, capacity=capacity) for fused in (False, True))
            for one, other in zip(plain, fused, strict=True):
                torch.testing.assert_close(one, other)
            print(f"{dispatcher} {' '.join(capacity)}: equal")
        dist.destroy_process_group()


main()
