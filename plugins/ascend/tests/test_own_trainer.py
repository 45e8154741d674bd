"""A trainer of a stranger's own on simulated NPUs: the losses are the processor's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "how-to" / "use-in-your-own-trainer.md"


def losses(text, platform):
    found = re.findall(rf"^{platform} (?:thd|bshd): ([\d. ]+)$", text, re.MULTILINE)
    assert len(found) == 2, text
    return [float(one) for line in found for one in line.split()]


def test_it_trains_as_on_the_processor():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "examples" / "own_trainer.py"), "3"],
        env={**os.environ, "ANYTRON_PLATFORM": "ascend"}, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    on_the_processor = losses(PAGE.read_text(encoding="utf-8"), "cpu")
    assert losses(done.stdout, "ascend") == pytest.approx(on_the_processor, abs=1e-4)
