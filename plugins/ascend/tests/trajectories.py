"""Follow recorded trajectories in processes whose environment is not this one's: ``programs/follow.py``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).parent / "programs" / "follow.py"


def follow(
    recorded: Any, platform: str, options: dict[str, Any], engines: list[Any], folder: Path, environment: dict[str, str]
) -> list[dict[str, Any]]:
    """Follow them with engine after engine, in the same ranks.

    Args:
        recorded: The trajectories.
        platform: Its name.
        options: ``platform.options``.
        engines: For each a model directory and section overrides.
        folder: For files of this function.
        environment: Of the processes; the repository's root must be on its PYTHONPATH.
    """
    torch.save(recorded, folder / "recorded.pt")
    plan = {"platform": platform, "options": options, "recorded": str(folder / "recorded.pt")}
    plan["engines"] = [(str(directory), sections) for directory, sections in engines]
    (folder / "plan.json").write_text(json.dumps(plan))
    output = folder / f"{platform}.pt"
    command = [sys.executable, str(PROGRAM), str(folder / "plan.json"), str(output)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1100)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(output, weights_only=False)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Log-probs, gradient norms, losses, and weights after three updates agree to 1e-4; a critic's too."""
    torch.testing.assert_close(found["log_probs"], expected["log_probs"], atol=1e-4, rtol=0)
    assert found["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-4)
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-4)
    if "values" in expected:
        assert expected["values"].abs().max() > 1e-2
        torch.testing.assert_close(found["values"], expected["values"], atol=1e-4, rtol=0)
        assert found["critic_grad_norms"] == pytest.approx(expected["critic_grad_norms"], rel=1e-4)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, atol=1e-4, rtol=0, msg=name)
