"""Check that the platform's modules compute in the number format of a run. Imports no Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anytron.config.diagnostics import Diagnostic
from anytron.device.platform import decisions_of
from anytron_megatron.options import MegatronOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anytron.config.schema import RunConfig
    from anytron.device.platform import Platform


def precision_diagnostics(run: RunConfig, platform: Platform) -> Iterator[Diagnostic]:
    """Check FP8 and FP4. Transformer Engine asks the device itself, which only training ranks may initialise."""
    transformer = MegatronOptions.of(run).transformer
    if not platform.portable_modules:
        yield from _delayed_scaling(run, transformer)
        return
    for name in ("fp8", "fp4"):
        if transformer.get(name):
            # Why they are portable, where the platform had a choice: to change that is the other way out.
            reasons = [f" ({one.reason})" for one in decisions_of(platform) if one.name == "modules"]
            yield Diagnostic(
                "error",
                f"engine.options.transformer.{name}",
                f"{platform.name} computes with the portable Transformer Engine{''.join(reasons)}, which has neither "
                "FP8 nor FP4",
                "set it to null and train in bfloat16 or float32",
            )


def _delayed_scaling(run: RunConfig, transformer: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """Say that checkpoints lack the scales: layers of Transformer Engine give and take them as pickles only."""
    delayed = transformer.get("fp8") and transformer.get("fp8_recipe", "delayed") == "delayed"
    if delayed and (run.checkpoint.keep > 0 or run.resume != "never"):
        yield Diagnostic(
            "warning",
            "engine.options.transformer.fp8_recipe",
            "a resumed run is not equal bit for bit: checkpoints do not hold the scales of FP8 with delayed scaling",
            "use the recipe tensorwise, blockwise or mxfp8, which keep no history",
        )
