"""Small runs in which a broken platform may change a number: the examples, cut to seconds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from anytron_conformance.tiny_models import turn_last_layers_into_prediction_modules, write_tiny_model

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
    "critic": ("ppo_sort", {"critic": {"warmup_steps": 0}}),
    "mtp": (
        "grpo_mla",
        {
            "model": {"config": None, "path": "model-with-modules"},
            "engine": {"options": {"mtp_loss_coefficient": 0.1, "mtp_detach": False}},
        },
    ),
}
"""By name: an example, and what is changed in it besides; a ``model.path`` is what :func:`write_models` has written."""

SAME: Mapping[str, str] = {"dropout": "dropout, kept"}
"""Runs whose random numbers are the device's own, and the run with the same platform that has the same numbers."""


def write_models(folder: Path) -> None:
    """Write the models of runs that do not start from random weights: transformers makes no prediction modules."""
    model = write_tiny_model(
        "deepseek_v3",
        folder / "model-with-modules",
        vocab_size=16,
        num_hidden_layers=3,
        bos_token_id=None,
        eos_token_id=11,
        pad_token_id=12,
    )
    turn_last_layers_into_prediction_modules(model, 1)


def configuration(
    name: str,
    platform: str,
    output: Path,
    models: Path,
    runs: Mapping[str, tuple[str, Mapping[str, Any]]] = RUNS,
) -> dict[str, Any]:
    """Give the tree of a run's file.

    Args:
        name: A key of ``runs``.
        platform: Name of the platform.
        output: ``trainer.output_dir``.
        models: What :func:`write_models` has written.
        runs: The runs by name; a section that is None is left out.
    """
    example, changes = runs[name]
    tree = yaml.safe_load((EXAMPLES / f"{example}.yaml").read_text(encoding="utf-8"))
    for sections in (SMALL, changes, {"platform": {"name": platform}, "trainer": {"output_dir": str(output)}}):
        tree = _merged(tree, sections)
    if "path" in tree["model"]:
        tree["model"]["path"] = str(models / tree["model"]["path"])
    return _anchored({name: section for name, section in tree.items() if section is not None})


def _merged(tree: Any, changes: Any) -> Any:
    """Replace what the changes name, however deep."""
    if not isinstance(tree, dict) or not isinstance(changes, dict):
        return changes
    return tree | {key: _merged(tree.get(key), value) for key, value in changes.items()}


def _anchored(value: Any) -> Any:
    """Let names of the example's modules be paths."""
    if isinstance(value, dict):
        return {key: _anchored(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_anchored(one) for one in value]
    return str(EXAMPLES / value) if isinstance(value, str) and ".py:" in value else value
