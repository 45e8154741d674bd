"""Environment variables of torch_npu, CANN and HCCL, and mistakes in those that are set already."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anytron_ascend.options import AscendOptions

VISIBLE_DEVICES = "ASCEND_RT_VISIBLE_DEVICES"
EXPANDABLE_SEGMENTS_SINCE = "2.9"
"""torch_npu whose expandable segments work with weight updates (verl, platform_npu.py, warns below it)."""


def worker_environment(options: AscendOptions, *, deterministic: bool) -> dict[str, str]:
    """Return the variables that every process with an NPU starts with."""
    environment = {
        # torch must not load torch_npu by itself: the platform does, when it is the chosen one.
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "HCCL_CONNECT_TIMEOUT": str(options.hccl_connect_timeout_s),
        # An operator without an NPU kernel is an error; torch_npu would run it on the host, slowly, and only warn
        # (torch_npu/csrc/framework/utils/CpuFallbackUtils.h).
        "TORCH_NPU_FALLBACK_CPU_DISABLE": "1",
    }
    if options.expandable_segments:
        environment["PYTORCH_NPU_ALLOC_CONF"] = "expandable_segments:True"
    if options.visible_devices is not None:
        environment[VISIBLE_DEVICES] = options.visible_devices
    if deterministic:
        # HCCL's reductions in a fixed order, and matrix products without shifting along K.
        environment |= {"HCCL_DETERMINISTIC": "true", "CLOSE_MATMUL_K_SHIFT": "1"}
    return environment


def visible_devices_mistake(variables: Mapping[str, str]) -> str:
    """Say what is wrong with ``ASCEND_RT_VISIBLE_DEVICES``; empty if nothing is.

    The driver reads ascending ids and silently stops at the first entry that is anything else.
    """
    value = variables.get(VISIBLE_DEVICES)
    if value is None:
        return ""
    entries = value.split(",")
    if not all(entry.isdigit() for entry in entries):
        return f"{VISIBLE_DEVICES}={value!r} is not a list of ids such as 0,1,2"
    ids = [int(entry) for entry in entries]
    if ids != sorted(set(ids)):
        return f"{VISIBLE_DEVICES}={value!r} is not in ascending order: the driver stops at the first id out of order"
    return ""
