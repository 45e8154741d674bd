"""The attention class that mcore-bridge builds, with a strict kernel, packed against padded. Run as: ... DIRECTORY.

DIRECTORY is where a tiny DeepSeek-V3 is written. Prints one JSON object.
"""

import json
import sys
from pathlib import Path

import torch

from anytron.base.traits import ParallelSizes
from anytron.device.hooks.types import PatchContext
from anytron.device.loading import hooks_of
from anytron.device.patches import Ledger, Phase
from anytron_cpu import CpuPlatform
from anytron_megatron.patches import trainer_patches

torch.set_num_threads(1)
directory = Path(sys.argv[1])
platform = CpuPlatform()
context = PatchContext(platform, "trainer", hooks_of(platform), "megatron")
ledger = Ledger(context=context)
for phase in (Phase.BEFORE_IMPORT, Phase.BEFORE_PARALLEL_INIT):
    ledger.apply(phase, trainer_patches(phase, context))
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)

from megatron.core import parallel_state  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM  # noqa: E402

parallel_state.initialize_model_parallel()
model_parallel_cuda_manual_seed(1)
ledger.apply(Phase.BEFORE_BUILD, trainer_patches(Phase.BEFORE_BUILD, context))

torch.manual_seed(0)
config = DeepseekV3Config(
    vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, first_k_dense_replace=1, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
    moe_intermediate_size=16, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
    n_group=1, topk_group=1, scoring_func="sigmoid", topk_method="noaux_tc", max_position_embeddings=64,
)  # fmt: skip
DeepseekV3ForCausalLM(config).float().save_pretrained(directory)

from anytron_megatron.models.bridge import BridgeSource  # noqa: E402

bridge = BridgeSource(
    directory, dtype=torch.float32, sizes=ParallelSizes(), recompute="none", deterministic=False, transformer={}
)
(model,) = bridge.build(torch.device("cpu"))
attention = model.decoder.layers[0].self_attention
core = attention.core_attention
inner, widths = core.forward, []


def strict(query, key, value, *arguments, **options):
    packed = options.get("packed_seq_params")
    if packed is not None:
        widths.append([query.shape[-1], value.shape[-1]])
        if query.shape[-1] != value.shape[-1]:
            raise ValueError("values must be as wide as queries")
    return inner(query, key, value, *arguments, **options)


core.forward = strict
ids = torch.tensor([[5, 9, 3, 7, 1, 8, 2, 6]])
lengths = torch.tensor([0, 5, 8], dtype=torch.int32)
positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
packed = PackedSeqParams("thd", lengths, lengths, lengths, lengths, max_seqlen_q=5, max_seqlen_kv=5)
with torch.no_grad():
    together = model(ids, positions, None, packed_seq_params=packed)[0]
    alone = [model(ids[:, part], positions[:, part], None)[0] for part in (slice(0, 5), slice(5, 8))]
facts = {
    "class": f"{type(attention).__module__}:{type(attention).__name__}",
    "own_forward": "forward" in vars(type(attention)),
    "widths": widths,
    "difference": float((together - torch.cat(alone)).abs().max()),
    "report": ledger.report(),
}
print(json.dumps(facts))
