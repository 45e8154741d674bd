"""Small runs in which a broken platform may change a number: the examples, cut to seconds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

SMALL: Mapping[str, Mapping[str, Any]] = {
    "data": {"prompts_per_step": 4},
    "rollout": {"samples_per_prompt": 4, "temperature": 0.7},
    "algorithm": {"kl_coefficient": 0.05, "entropy_coefficient": 0.01, "mini_batches": 2},
    # With a smaller epsilon a gradient that is 0 but for rounding would move a weight as far as any other.
    "optimizer": {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "schedule": "constant", "min_lr": 0.0},
    "engine": {"max_tokens_per_micro_batch": 48},
    "executor": {"num_threads": 1},
    "trainer": {"total_steps": 2, "save_hf": False, "max_restarts": 0},
    "tracking": {"plot": False},
}
"""Of every run: two steps of two updates, each of several micro-batches with several sequences."""

IMAGES = {
    "config": {
        "model_type": "qwen3_vl",
        "text_config": {
            "vocab_size": 16,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
            "bos_token_id": None,
            "eos_token_id": 7,
            "pad_token_id": 8,
        },
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 8,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        "vision_start_token_id": 12,
        "image_token_id": 13,
        "vision_end_token_id": 14,
        "video_token_id": 15,
        "tie_word_embeddings": False,
    }
}
"""The example's model has no layer norm; this one has."""

DROPOUT = {"lora": {"rank": 4, "dropout": 0.1}}

RUNS: Mapping[str, tuple[str, Mapping[str, Mapping[str, Any]]]] = {
    "qwen3": ("grpo_sort", {}),
    "bshd": ("grpo_sort", {"engine": {"sequence_format": "bshd"}}),
    "tp2": ("grpo_sort", {"parallel": {"tensor_model_parallel_size": 2}}),
    "pp2": ("grpo_sort", {"parallel": {"pipeline_model_parallel_size": 2}}),
    "cp2": ("grpo_sort", {"parallel": {"context_parallel_size": 2}}),
    "bfloat16": ("grpo_sort", {"model": {"dtype": "bfloat16"}}),
    "dropout": ("grpo_sort", {"model": DROPOUT, "engine": {"recompute": "full"}}),
    "dropout, kept": ("grpo_sort", {"model": DROPOUT}),
    "delta-net": ("grpo_gated_delta_net", {}),
    "delta-net, bshd": ("grpo_gated_delta_net", {"engine": {"sequence_format": "bshd"}}),
    "mla": ("grpo_mla", {}),
    "moe": ("grpo_moe", {}),
    "images": ("grpo_count_shapes", {"model": IMAGES}),
}
"""By name: an example, and what is changed in it besides."""

SAME: Mapping[str, str] = {"dropout": "dropout, kept"}
"""Runs whose random numbers are the device's own, and the run with the same platform that has the same numbers."""


def configuration(name: str, platform: str, output: Path) -> dict[str, Any]:
    """Give the tree of a run's file.

    Args:
        name: A key of :data:`RUNS`.
        platform: Name of the platform.
        output: ``trainer.output_dir``.
    """
    example, changes = RUNS[name]
    tree = yaml.safe_load((EXAMPLES / f"{example}.yaml").read_text(encoding="utf-8"))
    for sections in (SMALL, changes, {"platform": {"name": platform}, "trainer": {"output_dir": str(output)}}):
        for section, values in sections.items():
            tree[section] = {**tree.get(section, {}), **values}
    return _anchored(tree)


def _anchored(value: Any) -> Any:
    """Let names of the example's modules be paths."""
    if isinstance(value, dict):
        return {key: _anchored(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_anchored(one) for one in value]
    return str(EXAMPLES / value) if isinstance(value, str) and ".py:" in value else value
