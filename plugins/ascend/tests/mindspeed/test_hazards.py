"""Each hazard of MindSpeed is there, and is caught; with the real one."""

import subprocess
import sys
from pathlib import Path

import pytest

from anytron_ascend.mindspeed.process_state import GLOBALS

pytestmark = pytest.mark.mindspeed

PROGRAM = Path(__file__).parents[1] / "programs" / "mindspeed_hazards.py"


def run(with_mindspeed, *command):
    done = subprocess.run(
        [sys.executable, *command], env=with_mindspeed, capture_output=True, text=True, check=False, timeout=500
    )
    return done.returncode, done.stdout, done.stderr


def test_global_state(with_mindspeed):
    status, output, errors = run(with_mindspeed, str(PROGRAM))
    lines = [line for line in output.splitlines() if line.startswith(("caught", "MISSED"))]
    assert (status, [line for line in lines if line.startswith("MISSED")]) == (0, []), errors[-4000:]
    assert len(lines) == 16


def test_megatron_must_not_be_imported_before_it(with_mindspeed):
    program = (
        "import megatron.core\n"
        "from anytron.device.hooks.types import PatchContext\n"
        "from anytron.device.patches import Ledger, Phase\n"
        "from anytron.device.loading import open_session\n"
        "session = open_session(platform='ascend', options={'adaptor': 'mindspeed'})\n"
        "context = PatchContext(session.platform, 'trainer', session.hooks, 'megatron')\n"
        "ledger = Ledger(context=context)\n"
        "ledger.apply(Phase.BEFORE_IMPORT, session.platform.patch_model(Phase.BEFORE_IMPORT, context))\n"
    )
    status, _, errors = run(with_mindspeed, "-c", program)
    assert status != 0
    assert "megatron.core is imported already" in errors


def test_the_globals_are_where_they_are_looked_for(with_mindspeed):
    source = Path(with_mindspeed["ANYTRON_MINDSPEED"])
    for module, name in GLOBALS:
        text = (source / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        assert f"\n{name} = None\n" in text
