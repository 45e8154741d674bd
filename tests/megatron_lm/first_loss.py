"""Print the loss that transformers computes of pretrain_gpt.py's first batch: ``first_loss.py CHECKOUT SAVED RANKS``.

The weights come from Megatron's own checkpoint of the first step, whose learning rate was 0. The data are made anew.
"""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from anytron.train import open_device_stack

LAYERS, HIDDEN, HEADS, FFN, LENGTH, VOCABULARY, BATCH = 2, 64, 4, 96, 64, 128, 4


def weights(folder, ranks):
    """The whole model's weights, from each tensor-parallel rank's part."""
    parts = []
    for rank in range(ranks):
        path = Path(folder) / "iter_0000001" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        parts.append(torch.load(path, map_location="cpu", weights_only=False)["model"])

    def join(name, dim=0):
        return torch.cat([part[name] for part in parts], dim=dim)

    llama = {
        "model.embed_tokens.weight": join("embedding.word_embeddings.weight"),
        "model.norm.weight": parts[0]["decoder.final_layernorm.weight"],
        "lm_head.weight": join("output_layer.weight"),
    }
    for layer in range(LAYERS):
        own, its = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        qkv = join(f"{own}self_attention.linear_qkv.weight").view(HEADS, 3, HIDDEN // HEADS, HIDDEN)
        gate_up = [part[f"{own}mlp.linear_fc1.weight"].chunk(2) for part in parts]
        llama |= {
            f"{its}input_layernorm.weight": parts[0][f"{own}self_attention.linear_qkv.layer_norm_weight"],
            f"{its}post_attention_layernorm.weight": parts[0][f"{own}mlp.linear_fc1.layer_norm_weight"],
            **{f"{its}self_attn.{name}_proj.weight": qkv[:, i].flatten(0, 1) for i, name in enumerate("qkv")},
            f"{its}self_attn.o_proj.weight": join(f"{own}self_attention.linear_proj.weight", dim=1),
            f"{its}mlp.gate_proj.weight": torch.cat([gate for gate, _ in gate_up]),
            f"{its}mlp.up_proj.weight": torch.cat([up for _, up in gate_up]),
            f"{its}mlp.down_proj.weight": join(f"{own}mlp.linear_fc2.weight", dim=1),
        }
    return llama


def batch():
    """Tokens, labels and loss mask of the first samples."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
    from megatron.training.tokenizer.tokenizer import _NullTokenizer

    config = GPTDatasetConfig(
        random_seed=1234, sequence_length=LENGTH, split="1,1,1", tokenizer=_NullTokenizer(VOCABULARY - 1),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
    )  # fmt: skip
    train, *_ = BlendedMegatronDatasetBuilder(MockGPTDataset, (BATCH, 0, 0), lambda: True, config).build()
    samples = [train[index] for index in range(BATCH)]
    return [torch.stack([sample[name] for sample in samples]) for name in ("tokens", "labels", "loss_mask")]


def main():
    """Compute the loss."""
    sys.path.insert(0, sys.argv[1])
    open_device_stack("cpu")  # megatron.training, which has the tokenizer, cannot be imported without
    saved = weights(sys.argv[2], int(sys.argv[3]))
    config = LlamaConfig(
        vocab_size=len(saved["lm_head.weight"]), hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.load_state_dict(saved)
    tokens, labels, mask = batch()
    with torch.no_grad():
        logits = model.double()(tokens).logits
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    print(f"loss {float((losses * mask.flatten()).sum() / mask.sum()):.7f}")


main()
