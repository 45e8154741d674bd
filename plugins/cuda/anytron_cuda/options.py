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
    """Modules from which models are built: ``portable`` = Anytron's, in plain torch with CUDA kernels,
    ``transformer_engine`` = NVIDIA's, ``auto`` = NVIDIA's if they are installed and can be imported. FP8 needs
    NVIDIA's; generation on the training ranks needs the portable ones."""
    attention: Attention = "auto"
    """Attention kernel of the portable modules: ``flash_attention_3`` and ``flash_attention_2`` = the libraries,
    ``varlen`` and ``sdpa`` = torch's own, ``neutral`` = plain torch, ``auto`` = the fastest that can compute a layer.
    It is an error if the selected kernel cannot compute a layer."""
    expandable_segments: bool = True
    """Let the allocator of training ranks grow its blocks (``PYTORCH_CUDA_ALLOC_CONF``): micro-batches differ in
    length, and blocks of fixed sizes leave holes between them."""
    peak_tflops: float | None = Field(None, gt=0.0)
    """Peak of one GPU in ``model.dtype``, in 10^12 operations a second, for the metric ``throughput/mfu``; default: the
    number in NVIDIA's data sheets, by the GPU's name."""
    visible_devices: str | None = Field(None, pattern=r"^[^,\s]+(,[^,\s]+)*$")
    """GPUs that the run may use, indices or UUIDs as ``nvidia-smi -L`` lists them; default: ``CUDA_VISIBLE_DEVICES`` of
    the environment, or all GPUs."""
