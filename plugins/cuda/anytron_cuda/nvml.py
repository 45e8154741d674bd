"""Query NVIDIA's management library about driver and GPUs, without initialising CUDA."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
_TEXT = 96
"""Bytes of a name, version or UUID: the largest that nvml.h defines (NVML_DEVICE_UUID_V2_BUFFER_SIZE)."""


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine: its name, its UUID, and its compute capability (major, minor)."""

    name: str
    uuid: str
    compute_capability: tuple[int, int]


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver.

    Attributes:
        version: Version of the driver, for example ``570.86.15``.
        cuda: The newest CUDA version that it supports (major, minor).
        gpus: All GPUs of the machine, in the order of ``nvidia-smi``.
    """

    version: str
    cuda: tuple[int, int]
    gpus: tuple[Gpu, ...]

    def visible(self, variable: str | None) -> tuple[Gpu, ...]:
        """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` makes visible; all GPUs if an entry is a part of one (MIG).

        As in CUDA, the first entry that is not a GPU ends the list.
        """
        if variable is None:
            return self.gpus
        chosen: list[Gpu] = []
        for entry in variable.split(","):
            if entry.strip().startswith("MIG-"):
                return self.gpus
            found = [gpu for index, gpu in enumerate(self.gpus) if entry.strip() == str(index)]
            found += [gpu for gpu in self.gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry.strip())]
            if not found:
                break
            chosen.append(found[0])
        return tuple(chosen)


class NvmlError(Exception):
    """NVML, or the driver below it, cannot be used; the message says why."""


def read_driver(library: str = LIBRARY) -> Driver | None:
    """Query NVML; None if it is not installed.

    Raises:
        NvmlError: NVML is installed but does not answer, for example because the driver was updated without a restart.
    """
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return None
    _call(nvml, "nvmlInit_v2")
    try:
        cuda, count = ctypes.c_int(), ctypes.c_uint()
        driver = _text(nvml, "nvmlSystemGetDriverVersion")
        _call(nvml, "nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(cuda))
        _call(nvml, "nvmlDeviceGetCount_v2", ctypes.byref(count))
        gpus = tuple(_gpu(nvml, index) for index in range(count.value))
    finally:
        _call(nvml, "nvmlShutdown")
    # As CUDA numbers itself: 12040 is 12.4.
    return Driver(driver, (cuda.value // 1000, cuda.value % 1000 // 10), gpus)


def _gpu(nvml: Any, index: int) -> Gpu:
    handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    _call(nvml, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
    _call(nvml, "nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
    name, uuid = (_text(nvml, f"nvmlDeviceGet{what}", handle) for what in ("Name", "UUID"))
    return Gpu(name, uuid, (major.value, minor.value))


def _text(nvml: Any, function: str, *arguments: Any) -> str:
    buffer = ctypes.create_string_buffer(_TEXT)
    _call(nvml, function, *arguments, buffer, ctypes.c_uint(_TEXT))
    return buffer.value.decode(errors="replace")


def _call(nvml: Any, function: str, *arguments: Any) -> None:
    try:
        status = getattr(nvml, function)(*arguments)
    except AttributeError as error:
        raise NvmlError(f"{LIBRARY} has no {function}") from error
    if status != 0:
        explain = nvml.nvmlErrorString
        explain.restype = ctypes.c_char_p
        raise NvmlError(f"{function}: {explain(status).decode(errors='replace')}")
