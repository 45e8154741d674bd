"""The conformance kit with real MindSpeed on simulated NPUs: what it computes and how it trains."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.mindspeed

LEVELS = ("model", "training")


def test_the_rules_of_models_and_training(with_mindspeed):
    options = [word for level in LEVELS for word in ("--level", level)]
    command = [sys.executable, "-m", "anytron", "conformance", "ascend", "adaptor=mindspeed", *options, "--json"]
    done = subprocess.run(command, env=with_mindspeed, capture_output=True, text=True, check=False, timeout=3000)
    rules = [rule for level in json.loads(done.stdout)["levels"] for rule in level["rules"]]
    assert {rule["rule"]: rule["reason"] for rule in rules if rule["status"] != "passed"} == {}, done.stderr[-4000:]
    assert done.returncode == 0
