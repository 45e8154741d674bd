"""What latent attention builds for queries that are not compressed, with patches and without. Prints JSON."""

import json

import torch

from anytron.device.patches import Phase
from anytron.device.stack import open_device_stack

torch.set_num_threads(1)


def build():
    """The class of the projection of queries, and the names of its parameters."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    config = MLATransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=2, normalization="RMSNorm", q_lora_rank=None,
        kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=6, rope_type="rope", qk_layernorm=True,
        add_bias_linear=False,
    )  # fmt: skip
    spec = get_gpt_layer_with_transformer_engine_spec(multi_latent_attention=True, qk_layernorm=True)
    attention = MLASelfAttention(config, spec.submodules.self_attention.submodules, layer_number=1)
    return sorted(name for name, _ in attention.linear_q_proj.named_parameters())


with open_device_stack("cpu") as layer:
    layer.apply_phase(Phase.BEFORE_PARALLEL_INIT)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    facts = {"unpatched": build()}
    layer.apply_phase(Phase.BEFORE_BUILD)
    facts["patched"] = build()
    (facts["record"],) = [row for row in layer.ledger.report() if row["id"] == "megatron.mla-query-norm"]
print(json.dumps(facts))
