"""Check that the platform's modules compute in the number format of a run. Imports no Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.config.diagnostics import Diagnostic
from anytron_megatron.options import MegatronOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.config.schema import RunConfig
    from anytron.platform import Platform


def precision_diagnostics(run: RunConfig, platform: Platform) -> Iterator[Diagnostic]:
    """Check FP8 and FP4. Transformer Engine asks the device itself, which only training ranks may initialise."""
    if not platform.portable_modules:
        return
    transformer = MegatronOptions.of(run).transformer
    for name in ("fp8", "fp4"):
        if transformer.get(name):
            yield Diagnostic(
                "error",
                f"engine.options.transformer.{name}",
                f"{platform.name} computes with the portable Transformer Engine, which has neither FP8 nor FP4",
                "set it to null and train in bfloat16 or float32",
            )
