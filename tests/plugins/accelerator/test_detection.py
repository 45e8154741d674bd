"""What the platform `accelerator` finds out where no device is, and with packages that fail."""

import importlib
import subprocess
import sys

import pytest

from anytron import Availability, PlatformError
from anytron_accelerator import AcceleratorPlatform, detection
from anytron_accelerator.runtime import make_runtime


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine without drivers and without packages that add devices to torch."""
    monkeypatch.setattr(detection, "device_packages", tuple)
    monkeypatch.setattr(detection, "_torch_build", lambda: ([], True))
    for name in (detection.VARIABLE, "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
    detection.find_accelerator.cache_clear()
    yield
    detection.find_accelerator.cache_clear()


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
        monkeypatch.setattr(detection, "device_packages", lambda: ("torch_vendor",))
        importlib.invalidate_caches()

    yield installed
    sys.modules.pop("torch_vendor", None)


def probe(*, named=False, covered=()):
    platform = AcceleratorPlatform()
    platform.named, platform.covered_packages = named, frozenset(covered)
    return platform.probe()


@pytest.mark.parametrize(
    ("built_for", "reason"),
    [([], "torch knows no accelerator"), (["cuda"], "torch was built for cuda, but this machine has no driver for it")],
)
def test_without_a_package_or_a_driver_nothing_is_started(monkeypatch, built_for, reason):
    monkeypatch.setattr(detection, "_torch_build", lambda: (built_for, True))
    monkeypatch.setattr(detection, "BUILT_FOR", {"cuda": ("/dev/none-such",)})
    monkeypatch.setattr(subprocess, "run", None)
    found = probe()
    assert (found.availability, found.remedy) == (Availability.ABSENT, "")  # nothing to explain to a processor's user
    assert reason in found.reason


@pytest.mark.some(1)
@pytest.mark.parametrize(("named", "own_build"), [(True, True), (False, False)], ids=["named", "a vendor's torch"])
def test_torch_is_asked_without_a_driver(monkeypatch, named, own_build):
    monkeypatch.setattr(detection, "_torch_build", lambda: (["cuda"], own_build))
    monkeypatch.setattr(detection, "BUILT_FOR", {"cuda": ("/dev/none-such",)})
    found = probe(named=named)
    assert (found.availability, bool(found.remedy)) == (Availability.ABSENT, True)
    assert "torch.accelerator reports no device (loaded: torch (built for cuda))" in found.reason


@pytest.mark.slow
def test_torch_is_asked_if_the_platform_is_named():
    assert probe(named=True).reason == "torch.accelerator reports no device"


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("text", "availability", "reason"),
    [
        (
            "def load(): raise OSError('libvendor.so: cannot open')",
            "broken",
            "loaded: OSError: libvendor.so: cannot open",
        ),
        ("def load(): print('welcome')", "absent", "reports no device (loaded: torch_vendor)"),
        (
            "def load(): import os; os._exit(3)",
            "broken",
            "the process that imports torch, torch_vendor failed: exit status 3",
        ),
        ("def load(): import time; time.sleep(60)", "broken", "gave no answer within 3 seconds"),
    ],
    ids=["raises", "no device", "ends", "hangs"],
)
def test_a_package_that_adds_no_device_is_named(vendor, monkeypatch, text, availability, reason):
    monkeypatch.setattr(detection, "LIMIT_S", 3.0 if "sleep" in text else 60.0)
    vendor(text)
    found = probe()
    assert found.availability.value == availability
    assert reason in found.reason
    assert found.remedy


def test_a_package_of_another_platform_is_left_to_it(vendor, monkeypatch):
    vendor("def load(): raise OSError")
    monkeypatch.setattr(subprocess, "run", None)
    assert probe(covered=["torch_vendor"]).availability is Availability.ABSENT


def test_files_of_the_current_directory_do_not_answer(vendor, tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise OSError('not this one')")
    vendor("def load(): pass")
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.chdir(tmp_path)
    assert "reports no device" in probe().reason


def test_processes_do_not_ask_again(vendor, monkeypatch):
    monkeypatch.setenv(detection.VARIABLE, '{"devices": 2, "reason": "the driver asked", "device_type": "acme"}')
    monkeypatch.setattr(subprocess, "run", None)
    assert (probe(named=True).devices, probe(named=True).reason) == (2, "the driver asked")


@pytest.mark.parametrize(
    ("text", "why"),
    [("def load(): raise OSError('libvendor.so')", "OSError: libvendor.so"), ("def load(): pass", "none")],
)
def test_a_runtime_without_a_device_is_refused(vendor, text, why):
    vendor(text)
    with pytest.raises(PlatformError, match="torch does not report the accelerator acme") as refused:
        make_runtime("acme", "")
    assert why in refused.value.why
    assert refused.value.fix


@pytest.mark.some(1)
@pytest.mark.parametrize("text", ["acme", '{"devices": 1}', "[]"])
def test_an_answer_that_cannot_be_read_is_not_trusted(monkeypatch, text):
    monkeypatch.setenv(detection.VARIABLE, text)
    assert probe(named=True).reason == "torch.accelerator reports no device"


def test_torch_cuda_is_not_redirected_to_itself(monkeypatch):
    for kind, redirected in (("cuda", False), ("acme", True)):
        found = detection.Found(1, "", kind)
        monkeypatch.setattr("anytron_accelerator.platform.find_accelerator", lambda found=found, **_: found)
        platform = AcceleratorPlatform()
        platform.probe()
        assert platform.redirects_torch_cuda is redirected


@pytest.mark.parametrize(
    ("version", "own"), [("2.13.0", True), ("2.13.0+cu128", True), ("2.13.0+cpu", True), ("2.7.1+corex.4.3", False)]
)
def test_the_build_of_torch(tmp_path, monkeypatch, version, own):
    monkeypatch.undo()
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    (tmp_path / "torch" / "version.py").write_text(
        f"__version__ = '{version}'\ncuda: str | None = '12.8'\nhip: str = '6'\nrocm: str = '6'\nxpu = None\n"
    )
    origin = str(tmp_path / "torch" / "__init__.py")
    monkeypatch.setattr(detection, "find_spec", lambda name: type("Spec", (), {"origin": origin}))
    assert detection._torch_build() == (["cuda", "hip"], own)
