"""Each hazard of MindSpeed-LLM is there, and is caught; with the real one."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "programs" / "mindspeed_llm_hazards.py"


@pytest.mark.mindspeed_llm
def test_global_state(with_mindspeed_llm):
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env=with_mindspeed_llm,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("caught", "MISSED"))]
    missed = [line for line in lines if line.startswith("MISSED")]
    assert (done.returncode, missed) == (0, []), done.stderr[-4000:]
    assert len(lines) == 16
