"""Check FP8 and FP4 against the GPU. Transformer Engine would do so too, when the first layer computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron import Diagnostic

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from anytron import RunConfig
    from anytron_cuda.nvml import Gpu

Capability = tuple[int, int]

# transformer_engine/pytorch/quantization.py of 2.9: check_fp8_support, check_fp8_block_scaling_support,
# check_mxfp8_support, check_nvfp4_support.
FP8: dict[str, tuple[Capability, Capability | None, str]] = {
    "delayed": ((8, 9), None, "Ada, Hopper and Blackwell"),
    "tensorwise": ((8, 9), None, "Ada, Hopper and Blackwell"),
    "blockwise": ((9, 0), None, "Hopper and Blackwell"),
    "mxfp8": ((10, 0), (12, 0), "Blackwell's data center GPUs"),
}
"""Recipes of FP8: the first compute capability that has one, the first after it that has not, and what has it."""
FP4: tuple[Capability, Capability | None, str] = ((10, 0), None, "Blackwell")


def precision_diagnostics(run: RunConfig, gpus: Sequence[Gpu]) -> Iterator[Diagnostic]:
    """Find number formats that a GPU does not have.

    Args:
        run: Its ``engine.options.transformer`` names them as Megatron does.
        gpus: Those that ranks can get; none if the driver's machine has none.
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
                yield Diagnostic(
                    "error",
                    f"engine.options.transformer.{key}",
                    f"{what} is computed by {names}, and {gpu.name} has compute capability "
                    f"{gpu.compute_capability[0]}.{gpu.compute_capability[1]}",
                    "set it to null and train in bfloat16",
                )
                break
