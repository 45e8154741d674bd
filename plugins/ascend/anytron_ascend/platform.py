"""Huawei NPUs as a platform."""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from anytron import Platform, hookimpl
from anytron.hooks.types import Requirement
from anytron.platform import Availability, Probe
from anytron_ascend import cann

if TYPE_CHECKING:
    from anytron.platform import DeviceRuntime

_SOURCE_CANN = "source the set_env.sh of the CANN toolkit (by default in /usr/local/Ascend/ascend-toolkit)"
_OTHER = "or name another platform, for example ANYTRON_PLATFORM=cpu"


class AscendPlatform(Platform):
    """Megatron through torch_npu: its ``torch.cuda`` calls are redirected, its modules are portable ones."""

    name = "ascend"
    redirects_torch_cuda = True
    portable_modules = True
    device_packages = ("torch_npu",)

    def probe(self) -> Probe:
        """Tell apart: torch_npu missing or unfitting, CANN missing, no NPU, usable.

        Neither torch nor torch_npu is imported: torch_npu changes torch as it is imported, which a
        run on another platform must not see.
        """
        torch_npu = _installed("torch-npu")
        if torch_npu is None:
            return _without_torch_npu()
        torch = _installed("torch") or "missing"
        if torch.split(".")[:2] != torch_npu.split(".")[:2]:
            return Probe(
                Availability.BROKEN,
                f"torch_npu {torch_npu} is installed and torch is {torch}; their minor versions must be the same",
                f"pip install torch-npu=={torch.partition('+')[0]}, {_OTHER}",
            )
        try:
            devices = cann.device_count()
        except cann.CannError as error:
            reason = f"torch_npu {torch_npu} is installed, but CANN cannot be used: {error}"
            return Probe(Availability.BROKEN, reason, f"{_SOURCE_CANN}, {_OTHER}")
        if devices == 0:
            reason = f"torch_npu {torch_npu} and CANN are installed, and CANN finds no NPU"
            return Probe(Availability.ABSENT, reason, "check npu-smi info and ASCEND_RT_VISIBLE_DEVICES")
        return Probe(Availability.USABLE, f"{devices} NPU(s), torch_npu {torch_npu}", devices=devices)

    def runtime(self) -> DeviceRuntime:
        """The NPUs of this process; imports torch_npu."""
        return _runtime()

    @hookimpl
    def requirements(self) -> list[Requirement]:
        """torch_npu, of torch's own minor version (the probe compares them)."""
        return [Requirement("torch-npu", ">=2.6", "pip install torch-npu==<the version of your torch>")]


def _without_torch_npu() -> Probe:
    remedy = f"pip install torch-npu=={(_installed('torch') or '<the version of your torch>').partition('+')[0]}"
    nodes = cann.device_nodes()
    if nodes:
        reason = f"there are NPUs ({', '.join(nodes)}), but torch_npu is not installed"
        return Probe(Availability.BROKEN, reason, f"{remedy}, {_OTHER}")
    return Probe(Availability.ABSENT, "torch_npu is not installed, and there is no /dev/davinci* device", remedy)


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


@functools.cache
def _runtime() -> DeviceRuntime:
    from anytron_ascend.runtime import AscendRuntime

    return AscendRuntime()
