"""Whole runs of the sort task on a platform, as ``anytron train`` makes them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from anytron.base.errors import AnytronError, ConfigError
from anytron.base.results import of_error
from anytron.config.diagnostics import refuse
from anytron.proof.checks import Inapplicable
from anytron.proof.verification.comparisons import FACTORS
from anytron.record.tracking.progress import Progress
from anytron.run.preflight.open_run import open_run
from anytron.run.trainer.loop import train
from anytron.workers.executor.local import LocalExecutor
from anytron_conformance.rules import Broken
from anytron_conformance.training.sort_task import DIGITS, MODEL

if TYPE_CHECKING:
    from pathlib import Path

    from anytron_conformance.subject import Source

TASK = "anytron_conformance.training.sort_task"


@dataclass(frozen=True)
class Run:
    """What a run has left.

    Attributes:
        directory: Its files.
        steps: Metrics of each step.
        warnings: What it found suspicious.
        tolerance: How far metrics of the same step may differ, as a part of them.
    """

    directory: Path
    steps: list[dict[str, float]]
    warnings: list[str]
    tolerance: float


class _Warnings(Progress):
    """Keeps warnings."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def warn(self, text: str) -> None:
        """Keep it."""
        self.said.append(text)


def sections(source: Source, output: Path) -> dict[str, dict[str, Any]]:
    """Give the sections of a run's file: three steps of GRPO on the sort task, in float32."""
    return {
        "model": {"config": MODEL, "tokenizer": f"{TASK}:tokenizer", "dtype": "float32"},
        "data": {"source": f"{TASK}:prompts", "prompts_per_step": 4},
        "rollout": {"samples_per_prompt": 4, "max_new_tokens": DIGITS, "temperature": 0.7},
        "algorithm": {"kl_coefficient": 0.05, "entropy_coefficient": 0.01, "mini_batches": 2},
        "optimizer": {"lr": 5e-4},
        "engine": {"max_tokens_per_micro_batch": 48},
        "executor": {"num_threads": 1},
        "platform": {"name": source.platform, "options": dict(source.options)},
        "trainer": {"total_steps": 3, "output_dir": str(output), "save_hf": False, "max_restarts": 0},
        "checkpoint": {"every_steps": 2},
        "tracking": {"plot": False},
    }


def run(source: Source, output: Path, **changes: Any) -> Run:
    """Train.

    Args:
        source: The platform.
        output: Directory of the run; made.
        changes: Keys of sections to change, ``section__key``.

    Raises:
        Broken: The run fails.
        Inapplicable: It is refused.
    """
    tree: dict[str, Any] = {**sections(source, output), "rewards": [{"function": f"{TASK}:reward"}]}
    for name, value in changes.items():
        section, _, key = name.partition("__")
        if key:
            tree.setdefault(section, {})[key] = value
        else:
            tree[section] = value
    output.parent.mkdir(parents=True, exist_ok=True)
    file = output.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    warnings = _Warnings()
    try:
        refuse((opened := open_run(file, [])).diagnostics)
    except ConfigError as error:
        raise Inapplicable(f"refused: {error.why or error.what}") from error
    try:
        with LocalExecutor(opened.config, opened.session) as executor:
            train(opened.config, executor, warnings)
    except AnytronError as error:
        raise Broken(of_error("", error).explanation) from error
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return Run(output, [json.loads(line) for line in lines], warnings.said, 10 * FACTORS[opened.config.model.dtype])
