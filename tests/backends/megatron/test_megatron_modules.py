"""Modules of megatron-core can be imported in the layer, on a machine without triton."""

import importlib.util
import subprocess
import sys

from anytron.device.patches.plan import in_range, installed_version

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
OLDER = in_range(installed_version("megatron-core"), "<0.17")
NO_TRITON = "ModuleNotFoundError: No module named 'triton'"
# Their importers catch the error: a stand-in would take the place of what is computed instead.
CAUGHT = (
    ["inference.contexts.fused_kv_append_kernel"]  # by dynamic_context.py, which indexes with torch
    if OLDER
    else [
        "ssm.ops.causal_conv1d_varlen",  # by ssm/ops/__init__.py
        "ssm.ops.ssd_combined",  # by the same and by mamba_mixer.py; it imports the modules below
        "ssm.ops.ssd_bmm",
        "ssm.ops.ssd_chunk_scan",
        "ssm.ops.ssd_chunk_state",
        "ssm.ops.ssd_state_passing",
    ]
)
GUARDED = {
    **{f"megatron.core.{name}": NO_TRITON for name in CAUGHT},
    "megatron.core.ssm.triton_cache_manager": "ImportError: triton is required by the Mamba model "
    "but cannot be imported",
}
"""Modules whose importers expect them to fail without triton, and the errors."""
COMPILED = {
    "megatron.core.datasets.helpers": "ModuleNotFoundError: No module named 'megatron.core.datasets.helpers_cpp'"
}
"""What the wheel of Python 3.12 has compiled, which tox installs on 3.11 too: an index of Megatron's own data sets."""
OF_ANOTHER_PYTHON = not OLDER and sys.version_info < (3, 12)


def test_every_module_of_megatron_core_is_imported_but_those_whose_absence_is_expected():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=True
    )
    lines = [line.split("|", 2) for line in done.stdout.splitlines() if line.startswith("failed|")]
    found = {name: error for _, name, error in lines}
    guarded = {} if importlib.util.find_spec("triton") else GUARDED
    assert found == (guarded | COMPILED if OF_ANOTHER_PYTHON else guarded)
