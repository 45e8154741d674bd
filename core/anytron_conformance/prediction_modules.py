"""Tiny DeepSeek-V3 models with multi-token prediction modules."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def turn_last_layers_into_prediction_modules(directory: Path, count: int) -> None:
    """Make multi-token prediction modules of the last layers of a DeepSeek-V3, named as in the published files.

    Hugging Face's model has none: it reads the layers before them.

    Args:
        directory: Of a model with one file of weights; changed in place.
        count: Layers that become modules.
    """
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    torch.manual_seed(3)
    for number in range(layers - count, layers):
        module = {
            "enorm.weight": 1.0 + 0.1 * torch.randn(hidden),
            "hnorm.weight": 1.0 + 0.1 * torch.randn(hidden),
            "shared_head.norm.weight": 1.0 + 0.1 * torch.randn(hidden),
            "eh_proj.weight": 0.1 * torch.randn(hidden, 2 * hidden),
            "embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
            "shared_head.head.weight": weights["lm_head.weight"].clone(),
        }
        weights |= {f"model.layers.{number}.{name}": tensor for name, tensor in module.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config |= {"num_hidden_layers": layers - count, "num_nextn_predict_layers": count}
    (directory / "config.json").write_text(json.dumps(config))
