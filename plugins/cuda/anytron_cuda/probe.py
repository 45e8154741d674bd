"""Determine whether ``torch.cuda`` can be used on this machine, without initialising it."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from anytron import Availability, Probe
from anytron_cuda.nvml import Driver, Gpu, NvmlError, read_driver

DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/dev/dxg"))
"""Files of a running driver: the kernel driver's interface, and the GPU of the Windows Subsystem for Linux."""
LOOKALIKES = MappingProxyType(
    {
        "corex": "Iluvatar CoreX",
        "das": "Hygon DCU",
        "dtk": "Hygon DCU",
        "maca": "MetaX MACA",
        "metax": "MetaX MACA",
        "musa": "Moore Threads MUSA",
        "rocm": "AMD ROCm",
    }
)
"""Makers of devices that answer to ``torch.cuda``, by what they write into torch's version (``2.7.1+corex.4.4.0``)."""
NAMES = ("NVIDIA", "Tesla", "GeForce", "Quadro", "GRID", "TITAN", "Orin", "Thor")
"""Words of which the name of an NVIDIA device contains at least one."""
NAME_S = 120.0
"""Seconds that another process may take to initialise a device and name it."""
_OTHER = "choose another platform, for example ANYTRON_PLATFORM=cpu"
_VENDOR = f"install a platform plugin for this device (docs/how-to/write-a-platform.md), or {_OTHER}"


@dataclass(frozen=True)
class Facts:
    """The facts about this machine on which the probe's answer depends.

    Attributes:
        torch: Version of torch.
        cuda: The CUDA that torch is built with; None = none.
        hip: The ROCm that torch is built with; None = none.
        architectures: Architectures for which torch has machine code (``sm_90``) or code to translate (``compute_90``).
        driver_files: Whether files of NVIDIA's kernel driver exist.
        driver: Answer of NVML; None if there is no NVML, or it does not answer.
        driver_error: Why NVML does not answer.
        visible: ``CUDA_VISIBLE_DEVICES``.
        devices: How many devices torch counts.
        device_name: Name of the first device, if nothing else identifies its vendor.
        warning: Warning of torch while it counted devices.
    """

    torch: str
    cuda: str | None = None
    hip: str | None = None
    architectures: tuple[str, ...] = ()
    driver_files: bool = False
    driver: Driver | None = None
    driver_error: str = ""
    visible: str | None = None
    devices: int = 0
    device_name: str = ""
    warning: str = ""


def look() -> Facts | Probe:
    """Collect the facts; if torch cannot be imported, return the probe's answer instead."""
    try:
        import torch
    except (ImportError, OSError) as error:
        # OSError: a shared library of the CUDA build is missing.
        return Probe(Availability.BROKEN, f"torch cannot be imported: {error}", "reinstall torch")
    driver, driver_error = _driver()
    files = any(path.exists() for path in DRIVER_FILES)
    cuda = torch.version.cuda
    devices, warning = (0, "") if driver and cuda and _too_old(driver, cuda) else _count()
    unnamed = devices > 0 and torch.version.hip is None and driver is None and not files
    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()  # get_arch_list() of all versions
    return Facts(
        torch=torch.__version__,
        cuda=cuda,
        hip=torch.version.hip,
        architectures=tuple((flags or "").split()),
        driver_files=files,
        driver=driver,
        driver_error=driver_error,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        devices=devices,
        device_name=_name() if unnamed else "",
        warning=warning,
    )


def visible_gpus(variable: str | None) -> tuple[Gpu, ...]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` makes visible; none if NVML is not available."""
    driver, _ = _driver()
    return () if driver is None else driver.visible(variable)


def judge(facts: Facts | Probe) -> Probe:
    """Return the probe's answer from the facts: usable, no such device, or a device that cannot be used."""
    if isinstance(facts, Probe):
        return facts
    if maker := _maker(facts):
        availability = Availability.BROKEN if facts.devices else _missing(facts)
        reason = f"torch {facts.torch} uses devices of {maker} as torch.cuda, and this platform is for NVIDIA GPUs"
        return Probe(availability, reason, _VENDOR)
    seen = "an NVIDIA driver is running" if facts.driver_files else "no NVIDIA driver is running"
    if facts.cuda is None:
        reason = f"torch {facts.torch} is built without CUDA, and {seen}"
        remedy = "install a torch built with CUDA (see pytorch.org), or choose another platform"
        return Probe(_missing(facts), reason, remedy)
    if facts.driver_error:
        reason = f"NVIDIA's driver does not answer: {facts.driver_error}"
        return Probe(_missing(facts), reason, f"reboot, if the driver was updated; otherwise reinstall it; or {_OTHER}")
    if facts.driver is not None and _too_old(facts.driver, facts.cuda):
        newest = ".".join(map(str, facts.driver.cuda))
        reason = f"the driver {facts.driver.version} is too old: it supports CUDA {newest}, torch has CUDA {facts.cuda}"
        remedy = f"update the driver, or install a torch built with CUDA {facts.driver.cuda[0]} (see pytorch.org)"
        return Probe(Availability.BROKEN, reason, f"{remedy}, or {_OTHER}")
    if facts.devices == 0:
        variable = "" if facts.visible is None else f", CUDA_VISIBLE_DEVICES={facts.visible!r}"
        warned = f" ({facts.warning})" if facts.warning else ""
        reason = f"torch {facts.torch} (CUDA {facts.cuda}) finds no GPU{warned}, and {seen}{variable}"
        remedy = "check nvidia-smi, CUDA_VISIBLE_DEVICES and that the driver is new enough for this CUDA"
        return Probe(_missing(facts), reason, remedy)
    gpus = () if facts.driver is None else facts.driver.visible(facts.visible)
    for gpu in gpus:
        if facts.architectures and not runs_on(gpu.compute_capability, facts.architectures):
            capability = ".".join(map(str, gpu.compute_capability))
            reason = (
                f"torch {facts.torch} is not built for {gpu.name}, compute capability {capability}, but for "
                f"{' '.join(facts.architectures)}"
            )
            remedy = "install a torch that is built for it (see pytorch.org), or hide it with CUDA_VISIBLE_DEVICES"
            return Probe(Availability.BROKEN, reason, f"{remedy}, or {_OTHER}")
    names = ", ".join(dict.fromkeys(gpu.name for gpu in gpus)) or facts.device_name
    driver = f", driver {facts.driver.version}" if facts.driver else ""
    reason = f"{facts.devices} GPU(s){f', {names}' if names else ''}, CUDA {facts.cuda}{driver}"
    return Probe(Availability.USABLE, reason, devices=facts.devices)


def runs_on(capability: tuple[int, int], architectures: tuple[str, ...]) -> bool:
    """Whether code for one of the given architectures runs on a GPU.

    Machine code (``sm_86``) runs on GPUs with the same major version and the same or a later minor version. Code with
    architecture-specific features (``sm_90a``) runs on exactly that version. ``compute_90`` is translated for any later
    GPU. (CUDA C++ Programming Guide, "Binary Compatibility" and "PTX Compatibility"; torch/cuda/__init__.py,
    ``DEVICE_REQUIREMENT``.)
    """
    for one in architectures:
        kind, _, number = one.partition("_")
        digits = number.rstrip("af")
        if not digits.isdigit():
            return True  # of a form that is not known: torch itself will say
        built = (int(digits[:-1]), int(digits[-1]))
        if number.endswith("a"):
            fits = built == capability
        elif kind == "compute":
            fits = built <= capability
        else:
            fits = built[0] == capability[0] and built[1] <= capability[1]
        if fits:
            return True
    return False


def _maker(facts: Facts) -> str:
    """Return the maker of the devices that answer to ``torch.cuda``; empty if it is NVIDIA."""
    tag = facts.torch.partition("+")[2].lower()
    found = [maker for mark, maker in LOOKALIKES.items() if tag.startswith(mark)]
    if found:
        return found[0]
    if facts.hip is not None:
        return f"AMD ROCm {facts.hip}"
    if facts.device_name and not any(name in facts.device_name for name in NAMES):
        return f"another maker ({facts.device_name})"
    return ""


def _missing(facts: Facts) -> Availability:
    return Availability.BROKEN if facts.driver_files else Availability.ABSENT


def _too_old(driver: Driver, cuda: str) -> bool:
    """Whether a CUDA version needs a newer driver: within one major version, every driver serves every CUDA.

    (CUDA Compatibility, "Minor Version Compatibility".)
    """
    return driver.cuda[0] < int(cuda.partition(".")[0])


@functools.cache
def _driver() -> tuple[Driver | None, str]:
    try:
        return read_driver(), ""
    except NvmlError as error:
        return None, str(error)


def _count() -> tuple[int, str]:
    """Count devices. torch usually asks NVML, which creates no CUDA context, so that the process may still fork."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        devices = torch.cuda.device_count()
    return devices, "; ".join(str(one.message).split("(Triggered", 1)[0].strip() for one in caught)


def _name() -> str:
    """Return the name of the first device; it is read in another process, because this initialises the device."""
    command = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name(0))"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NAME_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
