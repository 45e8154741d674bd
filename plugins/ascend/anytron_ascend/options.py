"""``platform.options`` of the Ascend platform."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


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
    """Options of the adaptor ``mindspeed``; without effect on the others."""
    hccl_connect_timeout_s: int = Field(600, ge=120, le=7200)
    """Seconds that ranks wait for each other when a communicator is made (``HCCL_CONNECT_TIMEOUT``)."""
    expandable_segments: bool = False
    """Let torch_npu's allocator grow its blocks (``PYTORCH_NPU_ALLOC_CONF``); needs torch_npu 2.9 or later."""
    peak_tflops: float | None = Field(None, gt=0.0)
    """What one NPU can compute at most in ``model.dtype``, in 10^12 operations a second, for the metric
    ``throughput/mfu``; default: not known: there is no metric ``throughput/mfu``."""
    visible_devices: str | None = Field(None, pattern=r"^\d+(,\d+)*$")
    """NPUs that the run may use, ascending ids (``ASCEND_RT_VISIBLE_DEVICES``); default: what the environment says."""

    @field_validator("adaptor", mode="before")
    @classmethod
    def _engines_imply_theirs(cls, adaptor: str) -> str:
        if adaptor == "mindspeed_llm":
            raise ValueError("mindspeed_llm follows from engine.name=mindspeed_llm: leave platform.options.adaptor out")
        return adaptor
