"""A custom trainer on Anytron's device stack: Megatron's own model and a plain loop, packed and padded.

``python examples/own_trainer.py [STEPS]`` trains on any platform (``ANYTRON_PLATFORM``) a small model of Megatron's own
classes, with multi-latent attention, on packed sequences (thd) and on padded rows (bshd). The losses are the same.
"""

import sys

from anytron.train import DeviceStack, open_device_stack

VOCABULARY, CONTEXT = 64, 32


def train(stack: DeviceStack, sequence_format: str, steps: int) -> list[float]:
    """Build the model, and take some steps on the same three sequences; return the loss of each step."""
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from anytron import ModelTraits
    from anytron.sequences import RaggedBatch
    from anytron_megatron import batch_preparer, forward, token_log_probs

    config = MLATransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64, normalization="RMSNorm",
        q_lora_rank=16, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=6, rope_type="rope",
        add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, bias_dropout_fusion=False,
    )  # fmt: skip
    spec = get_gpt_layer_with_transformer_engine_spec(multi_latent_attention=True)
    model = GPTModel(config, spec, VOCABULARY, CONTEXT, position_embedding_type="rope")
    generator = torch.Generator().manual_seed(1)  # of the host: the same weights on every device
    for weight in (weight for weight in model.parameters() if weight.ndim > 1):
        weight.data.copy_(torch.randn(weight.shape, generator=generator) * config.init_method_std)
    model.to(stack.platform.runtime().current_device())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    preparer = batch_preparer(stack, sequence_format, context_length=CONTEXT, traits=ModelTraits(latent_attention=True))
    tokens = torch.randint(VOCABULARY, (20,), generator=generator)
    prepared = preparer.prepare(RaggedBatch(torch.tensor([7, 1, 12]), tokens, torch.ones(20, dtype=torch.bool)))
    losses = []
    for _ in range(steps):
        log_probs = token_log_probs(forward(model, prepared), preparer, prepared)  # [T], whatever the layout
        loss = -log_probs.sum() / len(prepared.scored)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


if __name__ == "__main__":
    with open_device_stack() as stack:  # before anything imports Megatron; leaving it undoes every patch
        from anytron_megatron import join

        join(stack)  # process groups, between the phases of patches
        for sequence_format in ("thd", "bshd"):
            losses = train(stack, sequence_format, int(sys.argv[1]) if len(sys.argv) > 1 else 5)
            sys.stdout.write(f"{stack.platform.name} {sequence_format}: {' '.join(map('{:.6f}'.format, losses))}\n")
