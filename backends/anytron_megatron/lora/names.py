"""Names of adapted layers and of PEFT's files. Imports no Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ALL_LINEAR = "all-linear"
"""The target that stands for every layer of :data:`LAYERS` that the language model has."""

LAYERS: Mapping[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
    "linear_q_proj": ("q_proj",),
    "linear_q_down_proj": ("q_a_proj",),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("kv_b_proj",),
    "in_proj": ("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    "in_proj_qkvz": ("in_proj_qkvz", "in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_ba", "in_proj_b", "in_proj_a"),
    "out_proj": ("out_proj",),
}
"""Megatron's name of a linear layer -> the Hugging Face layers that it holds, which share one adapter's ``A``."""

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
"""The two files of PEFT's format."""


def matches(path: str, target: str) -> bool:
    """Whether ``target``, an entry of ``model.lora.targets``, names the layer at ``path``."""
    return target == ALL_LINEAR or path == target or path.endswith(f".{target}")
