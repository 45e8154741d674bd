"""What GPUs can compute at most in bfloat16, from NVIDIA's data sheets."""

from __future__ import annotations

from anytron import PeakFlops

PEAK_TFLOPS = (
    ("GB200", 2500.0, "GB200 NVL72"),
    ("B200", 2250.0, "HGX B200"),
    ("B100", 1750.0, "HGX B100"),
    ("H200 NVL", 835.5, "H200"),
    ("H200", 989.5, "H200"),
    ("H100 NVL", 835.5, "H100"),
    ("GH200", 989.5, "GH200"),
    ("H100 PCIe", 756.5, "H100"),
    ("H100", 989.5, "H100"),
    ("H800 PCIe", 756.5, "H100"),
    ("H800", 989.5, "H100"),
    ("A100", 312.0, "A100"),
    ("A800", 312.0, "A100"),
    ("A40", 149.7, "A40"),
    ("A30", 165.0, "A30"),
    ("L40S", 362.0, "L40S"),
    ("L40", 181.0, "L40"),
    ("L4", 121.0, "L4"),
    ("RTX A6000", 154.8, "RTX A6000"),
    ("RTX 4090", 165.2, "Ada GPU architecture, appendix A"),
    ("RTX 3090", 71.0, "Ampere GA102 GPU architecture, appendix A"),
)
"""Part of the name that the driver gives, 10^12 operations a second, and the data sheet. Dense: sheets of GPUs for data
centres print the double, with sparsity. Of GeForce: with sums in float32. An H800 computes as an H100, an A800 as an
A100: links between GPUs differ. Names that hold another one stand before it."""


def peak_flops(name: str, dtype: str, configured: float | None) -> PeakFlops:
    """Find the number.

    Args:
        name: The driver's name of the GPU.
        dtype: Of the matrices.
        configured: ``platform.options.peak_tflops``, which wins.
    """
    fix = "set platform.options.peak_tflops"
    if configured is not None:
        return PeakFlops(configured * 1e12, "platform.options.peak_tflops")
    if dtype != "bfloat16":
        return PeakFlops(None, f"in {dtype} it depends on whether TF32 is allowed: {fix}")
    words = f" {name} ".replace("-", " ")
    for part, tflops, sheet in PEAK_TFLOPS:
        if f" {part} " in words:
            return PeakFlops(tflops * 1e12, f"NVIDIA's data sheet of {sheet}: bfloat16, dense")
    return PeakFlops(None, f"there is no number for {name}: {fix}")
