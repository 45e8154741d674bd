"""The Ascend probe tells its four cases apart, without importing torch and without raising.

torch_npu is present as metadata only: the probe must not import it. The CANN library of the last
cases is a real shared library with the one function that the probe calls.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parents[3] / "plugins" / "ascend"
PROBE = """
import json, sys
from anytron_ascend import AscendPlatform
probe = AscendPlatform().probe()
loaded = [name for name in ("torch", "torch_npu") if name in sys.modules]
print(json.dumps([probe.availability.value, probe.reason, probe.remedy, probe.devices, loaded]))
"""

pytestmark = pytest.mark.compiler


@pytest.fixture
def probe(tmp_path):
    """Probe in a fresh process; ``torch_npu`` is the version whose metadata is there, ``cann`` the library's C text."""

    def run(torch_npu: str | None = None, cann: str | None = None):
        if torch_npu is not None:
            info = tmp_path / f"torch_npu-{torch_npu}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch-npu\nVersion: {torch_npu}\n")
        if cann is not None:
            compiler = shutil.which("cc") or pytest.skip("needs a C compiler")
            source = tmp_path / "cann.c"
            source.write_text(cann)
            subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "libascendcl.so", source], check=True)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(PLUGIN), str(tmp_path)]),
            "LD_LIBRARY_PATH": str(tmp_path),
        }
        done = subprocess.run(
            [sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        availability, reason, remedy, devices, loaded = json.loads(done.stdout)
        assert loaded == []
        return availability, reason, remedy, devices

    return run


def fitting() -> str:
    return version("torch").partition("+")[0]


def test_without_torch_npu_and_without_a_device_it_is_absent(probe):
    availability, reason, remedy, _ = probe()
    assert availability == "absent"
    assert "torch_npu is not installed" in reason
    assert remedy == f"pip install torch-npu=={fitting()}"


def test_torch_npu_of_another_minor_version_is_broken(probe):
    availability, reason, remedy, _ = probe("1.11.0")
    assert availability == "broken"
    assert "minor versions must be the same" in reason
    assert f"torch-npu=={fitting()}" in remedy


def test_torch_npu_without_cann_is_broken_and_says_what_to_source(probe):
    availability, reason, remedy, _ = probe(fitting())
    assert availability == "broken"
    assert "CANN cannot be used: libascendcl.so" in reason
    assert "set_env.sh" in remedy
    assert "ANYTRON_PLATFORM=cpu" in remedy


def test_a_library_without_the_function_is_broken(probe):
    assert probe(fitting(), "int something_else(void) { return 0; }")[0] == "broken"


def test_a_failing_driver_is_broken_with_its_error_number(probe):
    availability, reason, _, _ = probe(fitting(), "int aclrtGetDeviceCount(unsigned *count) { return 507899; }")
    assert availability == "broken"
    assert "507899" in reason


def test_no_device_is_absent(probe):
    availability, reason, _, _ = probe(fitting(), "int aclrtGetDeviceCount(unsigned *count) { *count = 0; return 0; }")
    assert availability == "absent"
    assert "finds no NPU" in reason


def test_devices_are_counted(probe):
    availability, reason, remedy, devices = probe(
        fitting(), "int aclrtGetDeviceCount(unsigned *count) { *count = 8; return 0; }"
    )
    assert (availability, devices, remedy) == ("usable", 8, "")
    assert "8 NPU(s)" in reason
