"""Modules of megatron-core can be imported in the layer, on a machine without triton."""

import importlib.util
import subprocess
import sys

PROGRAM = """
import importlib, pkgutil
from anytron.train import open_device_stack
with open_device_stack("cpu"):
    import megatron.core
    for module in pkgutil.walk_packages(megatron.core.__path__, "megatron.core.", onerror=lambda name: None):
        try:
            importlib.import_module(module.name)
        except Exception as error:
            print("failed", module.name, f"{type(error).__name__}: {error}", sep="|")
"""
GUARDED = {
    # dynamic_context.py catches the error, and indexes with torch instead: a stand-in would take its place.
    "megatron.core.inference.contexts.fused_kv_append_kernel": "ModuleNotFoundError: No module named 'triton'",
    "megatron.core.ssm.triton_cache_manager": "ImportError: triton is required by the Mamba model "
    "but cannot be imported",
}
"""Modules whose importers expect them to fail without triton, and the errors."""


def test_every_module_of_megatron_core_is_imported_but_those_whose_absence_is_expected():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=True
    )
    lines = [line.split("|", 2) for line in done.stdout.splitlines() if line.startswith("failed|")]
    found = {name: error for _, name, error in lines}
    assert found == ({} if importlib.util.find_spec("triton") else GUARDED)
