"""``platform.options`` of the Ascend platform, and the environment variables that follow from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

if TYPE_CHECKING:
    from collections.abc import Mapping


class MindSpeedOptions(BaseModel):
    """Options of the adaptor ``mindspeed``; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    context_parallel_algo: Literal["megatron_cp_algo"] = "megatron_cp_algo"
    """How attention crosses context-parallel ranks: ``megatron_cp_algo`` = ring attention."""


class AscendOptions(BaseModel):
    """Options of the Ascend platform; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    adaptor: Literal["none", "mindspeed", "megatron_adaptor"] = "none"
    """What adapts Megatron to the NPU for the engine ``megatron``: ``none`` = portable modules with torch_npu's
    kernels, ``mindspeed`` = MindSpeed's patches and kernels, ``megatron_adaptor`` = not available yet. The engine
    ``mindspeed_llm`` brings its own adaptor."""
    mindspeed: MindSpeedOptions = MindSpeedOptions()
    """Options of the adaptor ``mindspeed``; without effect on other adaptors."""
    hccl_connect_timeout_s: int = Field(600, ge=120, le=7200)
    """Seconds that ranks wait for each other when a communicator is made (``HCCL_CONNECT_TIMEOUT``)."""
    expandable_segments: bool = False
    """Let torch_npu's allocator grow its blocks (``PYTORCH_NPU_ALLOC_CONF``); needs torch_npu 2.9 or later."""
    peak_tflops: float | None = Field(None, gt=0.0)
    """Peak compute rate of one NPU in ``model.dtype``, in 10^12 operations a second, for the metric
    ``throughput/mfu``; default: unknown, and the run has no metric ``throughput/mfu``."""
    visible_devices: str | None = Field(None, pattern=r"^\d+(,\d+)*$")
    """NPUs that the run may use, ascending ids (``ASCEND_RT_VISIBLE_DEVICES``); default: taken from the environment."""

    @field_validator("adaptor", mode="before")
    @classmethod
    def _engines_imply_theirs(cls, adaptor: str) -> str:
        if adaptor == "mindspeed_llm":
            raise ValueError("engine.name=mindspeed_llm selects this adaptor: remove platform.options.adaptor")
        return adaptor


VISIBLE_DEVICES = "ASCEND_RT_VISIBLE_DEVICES"
EXPANDABLE_SEGMENTS_SINCE = "2.9"
"""First torch_npu whose expandable segments work with weight updates (verl, platform_npu.py, warns below it)."""


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
    """Return the fault of ``ASCEND_RT_VISIBLE_DEVICES``; empty if there is none.

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
