"""A deterministic run, twice: what ``engine.deterministic=true`` promises on every platform."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from tests.house import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

STEPS = 2
OF_A_MACHINE = ("time/", "throughput/", "memory/")
"""Beginnings of the names of metrics that are others in every run."""


def assert_equal_runs(folder: Path, environment: Mapping[str, str], *overrides: str) -> None:
    """Train twice; the metrics of each step and the weights at the end are equal bit for bit.

    Args:
        folder: For the output of both runs.
        environment: Variables besides those of this process.
        overrides: Keys of the configuration.
    """
    first, second = (_trained(folder / name, environment, *overrides) for name in ("first", "second"))
    assert len(first[0]) == STEPS
    assert all(step["grad_norm"] > 0 for step in first[0]), "a run that learns nothing proves nothing"
    assert first == second


def _trained(output: Path, environment: Mapping[str, str], *overrides: str) -> tuple[list[dict[str, Any]], bytes]:
    command = [
        *(sys.executable, "-m", "anytron", "train", str(ROOT / "examples" / "grpo_sort.yaml")),
        *("engine.deterministic=true", f"trainer.total_steps={STEPS}", "data.prompts_per_step=4"),
        *(f"trainer.output_dir={output}", *overrides),
    ]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    own = [{name: value for name, value in step.items() if not name.startswith(OF_A_MACHINE)} for step in steps]
    (weights,) = output.joinpath("hf").glob("**/*.safetensors")
    return own, weights.read_bytes()
