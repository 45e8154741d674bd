"""Driver and GPUs are read from NVML: here, a shared library with the documented functions."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("plugin")]

SOURCE = Path(__file__).parent / "stand_ins" / "nvml.c"


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> str:
    compiler = shutil.which("cc") or pytest.skip("needs a C compiler")
    path = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", path, SOURCE], check=True)
    return str(path)


def test_versions_and_gpus(library):
    from anytron_cuda.nvml import Gpu, read_driver

    driver = read_driver(library)
    assert (driver.version, driver.cuda) == ("570.86.15", (12, 8))
    assert driver.gpus == (
        Gpu("NVIDIA H200", "GPU-11111111-aaaa-bbbb-cccc-000000000001", (9, 0)),
        Gpu("Tesla V100-SXM2-32GB", "GPU-22222222-aaaa-bbbb-cccc-000000000002", (7, 0)),
    )
    assert read_driver(library) == driver, "it is left as it was found"


@pytest.mark.parametrize(
    ("variable", "seen"),
    [
        (None, [0, 1]),
        ("1", [1]),
        ("1,0", [1, 0]),
        ("", []),
        ("-1", []),
        ("0,7,1", [0]),
        ("GPU-2222", [1]),
        ("GPU-2222,0", [1, 0]),
        ("GPU-3333", []),
        ("MIG-4444", [0, 1]),
    ],
)
def test_what_cuda_visible_devices_leaves(library, variable, seen):
    from anytron_cuda.nvml import read_driver

    driver = read_driver(library)
    assert driver.visible(variable) == tuple(driver.gpus[index] for index in seen)


def test_a_driver_that_does_not_answer_is_an_error_with_nvmls_own_words(library, monkeypatch):
    from anytron_cuda.nvml import NvmlError, read_driver

    monkeypatch.setenv("STAND_IN_NVML_INIT", "18")
    with pytest.raises(NvmlError, match="nvmlInit_v2: Driver/library version mismatch"):
        read_driver(library)


def test_without_nvml_there_is_no_driver(tmp_path):
    from anytron_cuda.nvml import read_driver

    assert read_driver(str(tmp_path / "libnvidia-ml.so.1")) is None


def test_a_library_that_lacks_a_function_is_an_error():
    from anytron_cuda.nvml import NvmlError, read_driver

    with pytest.raises(NvmlError, match="has no nvmlInit_v2"):
        read_driver("libc.so.6")
