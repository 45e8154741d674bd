"""What the platform `accelerator` finds out where no device is, and with packages that fail."""

import importlib
import json
import subprocess
import sys

import pytest

from anytron import Availability, PlatformError
from anytron_accelerator import AcceleratorPlatform, detection
from anytron_accelerator.runtime import make_runtime


@pytest.fixture
def vendor(tmp_path, monkeypatch):
    """Install a package whose entry point torch would load."""

    def installed(text):
        (tmp_path / "torch_vendor.py").write_text(text)
        information = tmp_path / "torch_vendor-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-vendor\nVersion: 1.0\n")
        (information / "entry_points.txt").write_text("[torch.backends]\nvendor = torch_vendor:load\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        importlib.invalidate_caches()
        detection.find_accelerator.cache_clear()

    yield installed
    sys.modules.pop("torch_vendor", None)
    detection.find_accelerator.cache_clear()


@pytest.mark.parametrize(
    ("built_for", "reason"),
    [([], "torch knows no accelerator"), (["cuda"], "torch is built for cuda, whose driver is not here")],
)
def test_without_a_package_or_a_driver_nothing_is_started(monkeypatch, built_for, reason):
    monkeypatch.setattr(detection, "device_packages", tuple)
    monkeypatch.setattr(detection, "_torch_is_built_for", lambda: built_for)
    monkeypatch.setattr(detection, "BUILT_FOR", {"cuda": ("/dev/none-such",)})
    monkeypatch.setattr(subprocess, "run", None)
    detection.find_accelerator.cache_clear()
    found = detection.find_accelerator()
    detection.find_accelerator.cache_clear()
    assert (found.devices, reason in found.reason) == (0, True)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "def load(): raise OSError('libvendor.so: cannot open')",
            "torch cannot be asked: OSError: libvendor.so: cannot open",
        ),
        ("def load(): print('welcome')", "reports no device of torch_vendor"),
        ("def load(): import os; os._exit(3)", "torch cannot be asked: exit status 3"),
        ("def load(): import time; time.sleep(60)", "gave no answer within 3 seconds"),
    ],
    ids=["raises", "no device", "ends", "hangs"],
)
def test_a_package_that_adds_no_device_is_named(vendor, monkeypatch, text, reason):
    monkeypatch.setattr(detection, "LIMIT_S", 3.0 if "sleep" in text else 60.0)
    vendor(text)
    platform = AcceleratorPlatform()
    probe = platform.probe()
    assert "torch_vendor" in platform.device_packages
    assert probe.availability is Availability.ABSENT
    assert reason in probe.reason
    assert probe.remedy


def test_a_processor_is_chosen_with_the_reason(vendor, tmp_path):
    vendor("def load(): raise OSError('libvendor.so: cannot open')")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "anytron", "plugins", "list", "--json"],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    found = {report["name"]: report for report in json.loads(done.stdout)}
    assert found["cpu"]["state"] == "active"
    assert "accelerator: torch_vendor: torch cannot be asked: OSError: libvendor.so" in found["cpu"]["reason"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("def load(): raise OSError('libvendor.so')", "torch_vendor, which adds a device to torch, cannot be loaded"),
        ("def load(): pass", "torch reports no accelerator in this process"),
    ],
)
def test_a_runtime_without_a_device_is_refused(vendor, text, what):
    vendor(text)
    with pytest.raises(PlatformError, match=what) as refused:
        make_runtime()
    assert all((refused.value.where or refused.value.why, refused.value.fix))


def test_types_that_torch_is_built_for(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    (tmp_path / "torch" / "version.py").write_text(
        "cuda: str | None = '12.8'\nhip: str = '6'\nrocm: str = '6'\nxpu = None\n"
    )
    monkeypatch.setattr(
        detection, "find_spec", lambda name: type("Spec", (), {"origin": str(tmp_path / name / "__init__.py")})
    )
    assert detection._torch_is_built_for() == ["cuda", "hip"]
