"""Packages that teach torch another device are out of reach, in the form in which torch_npu comes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from anytron.device.loading import open_session, survey_plugins

# What torch_npu does where the CANN toolkit is missing.
RAISES = "raise ImportError('libhccl.so: cannot open shared object file: No such file or directory')\n"


@pytest.fixture
def device(site):
    """``torch_npu``, which cannot be imported, registered with torch as the real one is; gone after the test."""
    site.install("torch-npu", RAISES, entry_points="[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    yield "torch_npu"
    sys.modules.pop("torch_npu", None)


def test_they_are_hidden_from_those_who_look(device):
    assert importlib.util.find_spec(device) is not None
    session = open_session("cpu")
    assert device in session.hidden
    assert importlib.util.find_spec(device) is None
    with pytest.raises(ModuleNotFoundError, match="halted"):
        importlib.import_module(device)
    assert device in open_session("cpu").hidden, "also when asked again"


def test_the_platform_that_owns_one_sees_it(site, device):
    site.platform("npx", body="    device_packages = ('torch_npu',)")
    assert device in open_session("cpu").hidden
    assert device not in open_session("npx").hidden
    assert importlib.util.find_spec(device) is not None


PROBE = """
    device_packages = ("torch_npu",)

    def probe(self):
        import importlib.util
        there = importlib.util.find_spec("torch_npu") is not None
        return Probe(Availability.USABLE if there else Availability.ABSENT, "find_spec")
"""


def test_a_probe_sees_its_own_package_after_a_session_of_another_platform(site, device):
    site.platform("npx", body=PROBE)
    assert device in open_session("cpu").hidden
    assert survey_plugins("cpu").error is None
    assert importlib.util.find_spec(device) is None, "hidden again, because the platform cpu is active"
    assert open_session("npx").platform.name == "npx"


def test_a_package_that_torch_would_not_load_is_hidden_if_a_platform_owns_it(site):
    site.install("npx-torch", "", entry_points="")
    site.platform("npx", "absent", body="    device_packages = ('npx_torch', 'not_installed')")
    try:
        hidden = open_session().hidden
        assert "npx_torch" in hidden
        assert "not_installed" not in hidden
    finally:
        del sys.modules["npx_torch"]


def test_one_that_was_imported_earlier_stays(site):
    site.install("npx-torch", "", entry_points="[torch.backends]\nnpx = npx_torch:load\n")
    module = importlib.import_module("npx_torch")
    assert "npx_torch" not in open_session("cpu").hidden
    assert sys.modules["npx_torch"] is module


ASK_TRANSFORMERS = """
import sys
from anytron.device.loading import disable_device_autoload, open_session
disable_device_autoload()
if sys.argv[1] == "hidden":
    open_session("cpu")
from transformers.utils import is_torch_npu_available
from accelerate.utils import is_npu_available
print(is_torch_npu_available(), is_npu_available())
"""


@pytest.mark.some(1)
@pytest.mark.parametrize("hidden", [True, False])
def test_transformers_runs_beside_one_that_cannot_be_imported(site, device, hidden):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site.path), *sys.path])}
    command = [sys.executable, "-W", "ignore", "-c", ASK_TRANSFORMERS, "hidden" if hidden else "plain"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    if hidden:
        assert (done.returncode, done.stdout) == (0, "False False\n"), done.stderr
    else:  # the fault that hiding cures: without it this test would show nothing
        assert "libhccl.so" in done.stderr


def test_doctor_says_what_is_hidden(site, device):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site.path), *sys.path]), "ANYTRON_PLATFORM": "cpu"}
    command = [sys.executable, "-m", "anytron", "doctor", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    found = {entry["name"]: entry for entry in json.loads(done.stdout)["results"]}
    assert found[f"platform.hidden.{device}"]["status"] == "passed", done.stderr
