"""A section validation for the small runs of these tests, and what it has found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.core.run.trainer.disturbed_runs import lines

if TYPE_CHECKING:
    from pathlib import Path

OF_THE_SECTION = {"every_steps", "before_training", "metric", "direction", "keep_best", "patience", "min_delta"}
"""Other keys are those of its set."""


def section(**keys) -> dict:
    digits = {
        "name": "digits",
        "data": {"source": "task.py:prompts", "options": {"count": 6, "digits": 3, "seed": 99}},
        "samples_per_prompt": 4,
        "pass_at": [1, 4],
        "pass_threshold": 0.3,
    }
    own = {name: keys.pop(name) for name in [*keys] if name not in OF_THE_SECTION}
    return {"sets": [digits | own], "every_steps": 2, "before_training": True} | keys


def found(path: Path) -> list[dict]:
    """Validations without what the clock says."""
    return [
        {name: value for name, value in record.items() if name != "validation/time_s"}
        for record in lines(path / "validation.jsonl")
    ]
