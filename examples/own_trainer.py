"""A trainer of one's own on Anytron's device layer: Megatron's own model, a plain loop, packed and padded alike.

Run it as ``python examples/own_trainer.py [STEPS]`` on any platform (``ANYTRON_PLATFORM``). It trains a small model
with multi-latent attention, built by Megatron's own classes, twice: on packed sequences (thd) and on padded rows
(bshd). The losses are the same.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from anytron.layer import open_layer
from anytron.patches import Phase

if TYPE_CHECKING:
    from anytron.layer import Layer

VOCABULARY, CONTEXT = 64, 32


def train(layer: Layer, sequence_format: str, steps: int) -> list[float]:
    """Build the model, and take some steps on the same three sequences; give the losses."""
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from anytron.batch import RaggedBatch
    from anytron.masks import MaskKind
    from anytron.sequences import scopes
    from anytron.traits import ModelTraits, ParallelSizes
    from anytron_megatron.training import parallel
    from anytron_megatron.training.micro_batch import BatchPreparer

    device = layer.platform.runtime().current_device()
    config = MLATransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64, normalization="RMSNorm",
        q_lora_rank=16, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=6, rope_type="rope",
        add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, bias_dropout_fusion=False,
    )  # fmt: skip
    spec = get_gpt_layer_with_transformer_engine_spec(multi_latent_attention=True)
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    model = GPTModel(config, spec, VOCABULARY, CONTEXT, position_embedding_type="rope").to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    micro_batches = BatchPreparer(
        layer.hooks,
        sequence_format=sequence_format,
        traits=ModelTraits(latent_attention=True),
        accepted=frozenset({MaskKind.NONE}),
        sizes=ParallelSizes(),
        shard=parallel.context_shard(),
        device=device,
        context_length=CONTEXT,
        portable=layer.platform.portable_modules,
    )
    lengths = torch.tensor([7, 1, 12])
    tokens = torch.randint(VOCABULARY, (20,), generator=torch.Generator().manual_seed(2))
    prepared = micro_batches.prepare(RaggedBatch(lengths, tokens, torch.ones(20, dtype=torch.bool)))
    labels = prepared.inputs.labels  # the next token of each position, negative where there is none
    losses = []
    for _ in range(steps):
        with scopes.enter(prepared.scope()):  # recomputation would enter it again by itself
            logits = model(**prepared.arguments())
            log_probs = logits.float().log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
            by_token = micro_batches.postprocess(log_probs.where(labels >= 0, 0.0), prepared)  # [T], no padding
            loss = -by_token.sum() / (labels >= 0).sum()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def start(layer: Layer) -> None:
    """Bring up process groups, Megatron's way, between the phases of patches."""
    layer.apply_phase(Phase.BEFORE_PARALLEL_INIT)
    import torch
    from megatron.core import parallel_state

    backend, store = layer.platform.runtime().communication_backend, torch.distributed.HashStore()
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    layer.apply_phase(Phase.BEFORE_BUILD)


def main(steps: int) -> None:
    """Train in both formats, on one rank."""
    with open_layer() as layer:  # before anything imports Megatron; leaving it undoes every patch
        start(layer)
        for sequence_format in ("thd", "bshd"):
            losses = train(layer, sequence_format, steps)
            sys.stdout.write(f"{layer.platform.name} {sequence_format}: {' '.join(map('{:.6f}'.format, losses))}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
