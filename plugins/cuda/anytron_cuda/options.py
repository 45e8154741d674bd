"""``platform.options`` of the CUDA platform."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Modules = Literal["auto", "portable", "transformer_engine"]
Attention = Literal["auto", "flash_attention_3", "flash_attention_2", "varlen", "sdpa", "neutral"]


class CudaOptions(BaseModel):
    """Options of the CUDA platform; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    modules: Modules = "auto"
    """Whose building blocks models are made of: ``portable`` = Anytron's, in plain torch with CUDA kernels,
    ``transformer_engine`` = NVIDIA's, ``auto`` = NVIDIA's where they are installed and can be imported. FP8 needs
    NVIDIA's; generation on the training ranks needs the portable ones."""
    attention: Attention = "auto"
    """What computes attention in the portable modules: ``flash_attention_3`` and ``flash_attention_2`` = the libraries,
    ``varlen`` and ``sdpa`` = torch's own, ``neutral`` = plain torch, ``auto`` = the fastest that can compute a layer.
    One that is named and cannot compute a layer is an error."""
    expandable_segments: bool = True
    """Let the allocator of training ranks grow its blocks (``PYTORCH_CUDA_ALLOC_CONF``): micro-batches differ in
    length, and blocks of fixed sizes leave holes between them."""
    peak_tflops: float | None = Field(None, gt=0.0)
    """What one GPU can compute at most in ``model.dtype``, in 10^12 operations a second, for the metric
    ``throughput/mfu``; default: what data sheets say, by the GPU's name."""
    visible_devices: str | None = Field(None, pattern=r"^[^,\s]+(,[^,\s]+)*$")
    """GPUs that the run may use, indices or UUIDs as ``nvidia-smi -L`` lists them (``CUDA_VISIBLE_DEVICES``); default:
    what the environment says."""
