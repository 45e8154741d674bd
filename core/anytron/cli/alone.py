"""A run's training engine alone, on one rank of this machine: what ``checkpoint export`` and ``replay`` start."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anytron.config.schema import RunConfig

_ALONE = (
    "parallel={}",
    "executor.kind=local",
    "data.mix=[]",
    "data.source=jsonl",
    "data.options={path: unread}",
    "environment=null",
    "validation=null",
    "rewards=[{function: exact_match}]",
    "reward_model=null",
    "rollout={samples_per_prompt: 2, max_new_tokens: 1}",  # what fits every algorithm and every model
    "checkpoint={}",
    "resume=never",
)
_UNTAUGHT = ("teacher=null", "algorithm.distillation_coefficient=0")
_CHUNKS = "virtual_pipeline_model_parallel_size"


def alone(config: RunConfig) -> list[str]:
    """Give the overrides that leave of a run its training engine on one rank, which has no need of the rest.

    Prompts, rewards, environment, validation, rollout engine, a teacher and a reward model are not used: what stands
    for them needs no files and no packages.

    Args:
        config: The run's.
    """
    chunks = [f"engine.options.{_CHUNKS}=1"] if _CHUNKS in config.engine.options else []
    rewarded = ["algorithm.advantage=grpo"] if config.algorithm.advantage == "none" else []
    return [*_ALONE, *(_UNTAUGHT if config.teacher is not None else ()), *rewarded, *chunks]


def override(key: str, value: object) -> str:
    """Write an override; paths may hold what YAML reads as something else."""
    return f"{key}={json.dumps(str(value))}"
