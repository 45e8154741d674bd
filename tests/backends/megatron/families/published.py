"""Write tiny models with published configurations.

``save_pretrained`` of transformers 5 would rename some of their fields: the directory gets the file in its published
form.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from anytron_conformance.tiny_models import write_random_model
from tests.backends.megatron.families.published_images import VISION_MODELS
from tests.backends.megatron.families.published_text import LANGUAGE_MODELS

if TYPE_CHECKING:
    from pathlib import Path

PUBLISHED: dict[str, dict[str, Any]] = {**LANGUAGE_MODELS, **VISION_MODELS}
"""Name -> Hugging Face config, with ``model_type``."""
SEEDS = {
    "dots1": 14,
    "glm4_5_air": 15,
    "glm4_moe_lite": 17,
    "hy_v3": 17,
    "kimi_k2": 13,
    "minimax_m2": 23,
    "moonlight": 21,
}
"""Seeds of the weights that are not 0. A sigmoid's scores lie close together: with these seeds, for no token an expert
that is chosen and one that is not are nearer to each other than 0.0029, so that bfloat16 can tell them."""


def write_published_model(name: str, directory: Path) -> Path:
    """Write a tiny model of :data:`PUBLISHED`, its ``config.json`` with the published fields.

    Args:
        name: A key of :data:`PUBLISHED`.
        directory: Output directory; created if it does not exist.
    """
    write_random_model(PUBLISHED[name], directory, seed=SEEDS.get(name, 0))
    (directory / "config.json").write_text(json.dumps(PUBLISHED[name], indent=1), encoding="utf-8")
    return directory
