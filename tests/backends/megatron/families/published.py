"""Write tiny models with published configurations.

``save_pretrained`` of transformers 5 would rename some of their fields: the directory gets the file in its published
form. Some published files have a ``model_type`` that transformers knows only with code of the directory: transformers
makes these models, or their language models, as another type (``anytron.task.data.model_files.as_known``), which the
directory does not name.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from anytron.task.data.composites import COMPOSITES
from anytron.task.data.model_files import as_known, tensor_names
from anytron_conformance.tiny_models import write_random_model
from tests.backends.megatron.families.published_composites import OTHER_TENSORS, WHOLE_MODELS
from tests.backends.megatron.families.published_images import VISION_MODELS
from tests.backends.megatron.families.published_latent import LATENT_MODELS
from tests.backends.megatron.families.published_omni import OMNI_MODELS
from tests.backends.megatron.families.published_text import LANGUAGE_MODELS
from tests.backends.megatron.families.published_towers import IDLE_TOWERS

if TYPE_CHECKING:
    from pathlib import Path

PUBLISHED: dict[str, dict[str, Any]] = {
    **LANGUAGE_MODELS,
    **LATENT_MODELS,
    **VISION_MODELS,
    **IDLE_TOWERS,
    **OMNI_MODELS,
    **WHOLE_MODELS,
}
"""Name -> Hugging Face config, with ``model_type``."""


def turn_experts(file: Path) -> None:
    """Exchange the last two dimensions of the experts' weights in a file of Qwen3-VL-MoE.

    Published files have ``[E, H, 2 I]`` and ``[E, I, H]``, those of transformers 5 ``[E, 2 I, H]`` and ``[E, H, I]``.
    """
    ends = (".experts.gate_up_proj", ".experts.down_proj")
    weights = load_file(file)
    turned = {name: tensor.mT.contiguous() if name.endswith(ends) else tensor for name, tensor in weights.items()}
    save_file(turned, file, {"format": "pt"})


def write_published_model(name: str, directory: Path) -> Path:
    """Write a tiny model of :data:`PUBLISHED`, its ``config.json`` with the published fields.

    Args:
        name: A key of :data:`PUBLISHED`.
        directory: Output directory; created if it does not exist.
    """
    write_random_model(as_known(PUBLISHED[name]), directory)
    if PUBLISHED[name]["model_type"] == "qwen3_vl_moe":
        turn_experts(directory / "model.safetensors")
    if PUBLISHED[name]["model_type"] in ("gemma4", "gemma4_unified"):
        _soften(directory / "model.safetensors")
    if PUBLISHED[name]["model_type"] == "nemotron_h":
        _lengthen(directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(PUBLISHED[name], indent=1), encoding="utf-8")
    if PUBLISHED[name]["model_type"] in COMPOSITES:
        _surround(directory, OTHER_TENSORS[PUBLISHED[name]["model_type"]])
    return directory


def _surround(directory: Path, others: tuple[str, ...]) -> None:
    """Give a language model's tensors their published names, and put tensors of a tower and an aligner beside them."""
    file, outer = directory / "model.safetensors", tensor_names(directory).outer
    weights = {outer(name): tensor for name, tensor in load_file(file).items()}
    generator = torch.Generator().manual_seed(5)
    weights |= {name: torch.randn(3, 5, generator=generator).bfloat16() for name in others}
    save_file(weights, file, {"format": "pt"})


def _soften(file: Path) -> None:
    """Divide the weights of the queries' norms by 4: Gemma 4 divides no scores, and random ones would be large."""
    weights = load_file(file)
    for name in weights:
        if name.endswith("self_attn.q_norm.weight"):
            weights[name] = weights[name] / 4
    save_file(weights, file, {"format": "pt"})


def _lengthen(file: Path) -> None:
    """Let the heads of Nemotron-3 take steps of 0.05 to 0.7: random ones would hardly write into their states.

    transformers bounds steps by ``time_step_min``, 0.001; Megatron and vLLM do not.
    """
    weights = load_file(file)
    for name in weights:
        if name.endswith("dt_bias"):
            weights[name] = torch.linspace(-3, 0, len(weights[name]))
    save_file(weights, file, {"format": "pt"})
