"""Capabilities of GPU models: their peak in bfloat16, from data sheets, and support of FP8 and FP4."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron import Diagnostic, PeakFlops

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from anytron import RunConfig
    from anytron_cuda.nvml import Gpu


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
"""Part of the driver's name of a GPU, its dense peak in bfloat16 in 10^12 operations a second, and the data sheet.
Sheets of GPUs for data centres print twice this number, with sparsity; numbers of GeForce GPUs are for sums in float32.
An H800 computes like an H100, and an A800 like an A100: only their links differ. The first match counts, so a name
stands before the names that it contains."""

Capability = tuple[int, int]


# transformer_engine/pytorch/quantization.py of 2.9: check_fp8_support, check_fp8_block_scaling_support,
# check_mxfp8_support, check_nvfp4_support.
FP8: dict[str, tuple[Capability, Capability | None, str]] = {
    "delayed": ((8, 9), None, "Ada, Hopper and Blackwell"),
    "tensorwise": ((8, 9), None, "Ada, Hopper and Blackwell"),
    "blockwise": ((9, 0), None, "Hopper and Blackwell"),
    "mxfp8": ((10, 0), (12, 0), "Blackwell's data center GPUs"),
}
"""By recipe of FP8: the first compute capability that supports it, the first later one that does not (None = all do),
and the GPUs that support it."""

FP4: tuple[Capability, Capability | None, str] = ((10, 0), None, "Blackwell")


def peak_flops(name: str, dtype: str, configured: float | None) -> PeakFlops:
    """Find the peak of a GPU, in operations a second.

    Args:
        name: The driver's name of the GPU.
        dtype: Element type of the matrices.
        configured: ``platform.options.peak_tflops``, which takes precedence.
    """
    fix = "set platform.options.peak_tflops"
    if configured is not None:
        return PeakFlops(configured * 1e12, "platform.options.peak_tflops")
    if dtype != "bfloat16":
        return PeakFlops(None, f"the peak in {dtype} depends on whether TF32 is allowed: {fix}")
    words = f" {name} ".replace("-", " ")
    for part, tflops, sheet in PEAK_TFLOPS:
        if f" {part} " in words:
            return PeakFlops(tflops * 1e12, f"NVIDIA's data sheet of {sheet}: bfloat16, dense")
    return PeakFlops(None, f"no peak is known for {name}: {fix}")


def precision_diagnostics(run: RunConfig, gpus: Sequence[Gpu]) -> Iterator[Diagnostic]:
    """Find number formats that a GPU lacks, which Transformer Engine would refuse only when the first layer computes.

    Args:
        run: The run; ``engine.options.transformer`` selects the formats.
        gpus: GPUs that ranks can get; empty if the driver's machine has none.
    """
    transformer = run.engine.options.get("transformer") or {}
    recipe = transformer.get("fp8_recipe", "delayed")
    wanted = {"fp8": FP8.get(recipe), "fp4": FP4}
    for key, needed in wanted.items():
        if not transformer.get(key) or needed is None:
            continue
        first, end, names = needed
        for gpu in gpus:
            if gpu.compute_capability < first or (end is not None and gpu.compute_capability >= end):
                what = f"FP8 with the recipe {recipe}" if key == "fp8" else "FP4"
                below = "" if end is None else f", below {end[0]}.{end[1]}"
                yield Diagnostic(
                    "error",
                    f"engine.options.transformer.{key}",
                    f"{what} runs on {names} only (compute capability {first[0]}.{first[1]} or higher{below}), and "
                    f"{gpu.name} has {gpu.compute_capability[0]}.{gpu.compute_capability[1]}",
                    f"set engine.options.transformer.{key}=null, and train in bfloat16",
                )
                break
