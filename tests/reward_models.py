"""Reward models on disk: of a language model's trunk and a head that is drawn, and one whose scores are known."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from anytron_conformance.training.sort_task import tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def write_reward_model(model: Path, directory: Path, *, labels: int = 1, **changes: Any) -> Path:
    """Write what transformers loads as a classifier of sequences.

    Args:
        model: Directory of a language model, or of a classifier, with one file of weights.
        directory: Made if it is not there.
        labels: Rows of the head.
        changes: Fields of the config to replace.

    Returns:
        The directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    names = [name.replace("ForCausalLM", "ForSequenceClassification") for name in config["architectures"]]
    config |= {
        "architectures": names,
        "id2label": {str(row): f"LABEL_{row}" for row in range(labels)},
        "label2id": {f"LABEL_{row}": row for row in range(labels)},
        **changes,
    }
    (directory / "config.json").write_text(json.dumps(config))
    weights = {name: one for name, one in load_file(model / "model.safetensors").items() if name != "lm_head.weight"}
    head = torch.randn(labels, config["hidden_size"], generator=torch.Generator().manual_seed(7))
    weights["score.weight"] = head * config["hidden_size"] ** -0.5
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_judge_of_last_tokens(directory: Path, scores: Sequence[float], *, padding: int | None) -> Path:
    """Write a reward model of the task of sorting that says of a sequence what its last token is worth.

    Its only layer adds nothing, so that the hidden state of a token is a unit vector of its own, and the head reads
    from it what the token is worth.

    Args:
        directory: Made if it is not there.
        scores: What each of the 16 tokens is worth.
        padding: The token that the model takes for padding: the one before it counts.
    """
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    size = len(scores)
    config = Qwen3Config(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=2 * size,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        rms_norm_eps=1e-12,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=padding,
        num_labels=1,
    )
    model = Qwen3ForSequenceClassification(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        # The last norm gives each unit vector the length sqrt(size).
        model.score.weight.copy_(torch.tensor(scores)[None] / size**0.5)
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory
