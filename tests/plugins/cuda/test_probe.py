"""What answers to ``torch.cuda`` is told apart by facts, and refused by name where it is not a usable NVIDIA GPU."""

from __future__ import annotations

import pytest

from anytron.device.platform import Availability

pytestmark = pytest.mark.usefixtures("plugin")

ABSENT, BROKEN, USABLE = Availability.ABSENT, Availability.BROKEN, Availability.USABLE
WHEEL = {"torch": "2.9.0+cu128", "cuda": "12.8", "architectures": ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100")}


def driver(*capabilities, cuda=(12, 8)):
    from anytron_cuda.nvml import Driver, Gpu

    gpus = (Gpu(f"NVIDIA sm_{major}{minor}", f"GPU-{major}{minor}", (major, minor)) for major, minor in capabilities)
    return {"driver": Driver("570.86.15", cuda, tuple(gpus)), "driver_files": True}


def probe(facts):
    from anytron_cuda.probe import Facts, judge

    return judge(Facts(**facts))


def test_usable():
    found = probe({**WHEEL, **driver((9, 0), (9, 0)), "devices": 2})
    assert (found.availability, found.devices, found.remedy) == (USABLE, 2, "")
    assert found.reason == "2 GPU(s), NVIDIA sm_90, CUDA 12.8, driver 570.86.15"


def test_usable_where_nvml_is_not_installed():
    found = probe({**WHEEL, "driver_files": True, "devices": 1})
    assert (found.availability, found.reason) == (USABLE, "1 GPU(s), CUDA 12.8")
    unnamed = probe({**WHEEL, "device_name": "NVIDIA L4", "devices": 1})
    assert (unnamed.availability, unnamed.reason) == (USABLE, "1 GPU(s), NVIDIA L4, CUDA 12.8")


@pytest.mark.parametrize(("files", "expected"), [(False, ABSENT), (True, BROKEN)])
@pytest.mark.parametrize(
    ("facts", "reason", "remedy"),
    [
        ({"torch": "2.9.0+cpu"}, "is built without CUDA", "pytorch.org"),
        (WHEEL, "finds no GPU", "nvidia-smi"),
        ({**WHEEL, "visible": ""}, "CUDA_VISIBLE_DEVICES=''", "CUDA_VISIBLE_DEVICES"),
        (
            {**WHEEL, "warning": "CUDA initialization: unknown error"},
            "(CUDA initialization: unknown error)",
            "nvidia-smi",
        ),
        ({**WHEEL, "driver_error": "nvmlInit_v2: Driver/library version mismatch"}, "version mismatch", "reboot"),
    ],
)
def test_no_device_is_broken_where_there_is_a_driver_and_absent_elsewhere(facts, reason, remedy, files, expected):
    found = probe({**facts, "driver_files": files})
    assert (found.availability, found.devices) == (expected, 0)
    assert reason in found.reason
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("facts", "maker"),
    [
        ({"torch": "2.9.0+rocm6.4", "hip": "6.4.43482"}, "AMD ROCm"),
        ({"torch": "2.4.1+gitabc", "hip": "6.2.0"}, "AMD ROCm 6.2.0"),
        ({"torch": "2.5.1+das.opt1.dtk25041", "hip": "6.1.0"}, "Hygon DCU"),
        ({"torch": "2.7.1+corex.4.4.0", "cuda": "10.2"}, "Iluvatar CoreX"),
        ({"torch": "2.6.0+metax3.2.1.3", "cuda": "11.6"}, "MetaX MACA"),
        ({"torch": "2.5.0+musa4.2", "cuda": "12.0"}, "Moore Threads MUSA"),
        ({"torch": "2.5.1", "cuda": "11.7", "device_name": "KUNLUNXIN P800"}, "another maker (KUNLUNXIN P800)"),
    ],
)
def test_what_only_answers_to_torch_cuda_is_refused_by_name(facts, maker):
    found = probe({**facts, "devices": 8})
    assert (found.availability, found.devices) == (BROKEN, 0)
    assert f"devices of {maker}" in found.reason
    assert "write-a-platform.md" in found.remedy
    if "device_name" not in facts:
        assert probe(facts).availability is ABSENT, "that torch is installed, and there is no device"


@pytest.mark.parametrize(("cuda", "fits"), [((11, 8), False), ((12, 2), True), ((12, 8), True), ((13, 0), True)])
def test_a_driver_serves_every_cuda_of_its_own_major_version_and_of_earlier_ones(cuda, fits):
    found = probe({**WHEEL, **driver((9, 0), cuda=cuda), "devices": 1})
    assert (found.availability is USABLE) is fits
    if not fits:
        assert found.reason == "the driver 570.86.15 is too old: it supports CUDA 11.8, torch has CUDA 12.8"
        assert "update the driver, or install a torch built with CUDA 11" in found.remedy


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((9, 0), ("sm_80", "sm_90"), True),
        ((8, 9), ("sm_80", "sm_90"), True),  # the same major version, built for an earlier minor one
        ((8, 0), ("sm_86",), False),
        ((7, 0), ("sm_75", "sm_80"), False),
        ((12, 0), ("sm_90", "compute_90"), True),  # translated
        ((12, 0), ("sm_90", "sm_100"), False),
        ((9, 0), ("sm_90a",), True),
        ((9, 1), ("sm_90a",), False),  # features of one architecture
        ((12, 0), ("sm_120f",), True),
        ((12, 0), ("something_else",), True),  # torch itself will say
    ],
)
def test_code_runs_on_gpus_as_cuda_promises(capability, architectures, runs):
    from anytron_cuda.probe import runs_on

    assert runs_on(capability, architectures) is runs


def test_a_gpu_that_torch_has_no_code_for_is_broken_unless_it_is_hidden():
    facts = {**WHEEL, **driver((9, 0), (7, 0)), "devices": 2}
    found = probe(facts)
    assert found.availability is BROKEN
    assert "not built for NVIDIA sm_70, compute capability 7.0, but for sm_75 sm_80 sm_86 sm_90 sm_100" in found.reason
    assert "CUDA_VISIBLE_DEVICES" in found.remedy
    assert probe({**facts, "visible": "0", "devices": 1}).availability is USABLE
