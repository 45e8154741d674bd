"""The engine is written over a source of models, and imports nothing that only one source has."""

import subprocess
import sys

PROGRAM = """
import sys
import anytron_megatron.engine
print(*sorted(sys.modules))
"""


def test_the_engine_imports_nothing_that_only_models_of_mcore_bridge_have():
    """An engine over other models may run on another Megatron, without mcore-bridge and without PEFT."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.splitlines()[-1].split()
    assert "anytron_megatron.models.source" in loaded
    for module in ("mcore_bridge", "peft", "anytron_megatron.lora.adapters", "anytron_megatron.experts.router_replay"):
        assert module not in loaded
