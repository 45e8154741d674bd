"""Write tiny models with published configurations.

``save_pretrained`` of transformers 5 would rename some of their fields: the directory gets the file in its published
form.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file

from anytron_conformance.tiny_models import write_random_model
from tests.backends.megatron.families.published_images import VISION_MODELS
from tests.backends.megatron.families.published_text import LANGUAGE_MODELS

if TYPE_CHECKING:
    from pathlib import Path

PUBLISHED: dict[str, dict[str, Any]] = {**LANGUAGE_MODELS, **VISION_MODELS}
"""Name -> Hugging Face config, with ``model_type``."""


def write_published_model(name: str, directory: Path) -> Path:
    """Write a tiny model of :data:`PUBLISHED`, its ``config.json`` with the published fields.

    Args:
        name: A key of :data:`PUBLISHED`.
        directory: Output directory; created if it does not exist.
    """
    write_random_model(PUBLISHED[name], directory)
    if PUBLISHED[name]["model_type"] == "gemma4":
        _soften(directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(PUBLISHED[name], indent=1), encoding="utf-8")
    return directory


def _soften(file: Path) -> None:
    """Divide the weights of the queries' norms by 4: Gemma 4 divides no scores, and random ones would be large."""
    weights = load_file(file)
    for name in weights:
        if name.endswith("self_attn.q_norm.weight"):
            weights[name] = weights[name] / 4
    save_file(weights, file, {"format": "pt"})
