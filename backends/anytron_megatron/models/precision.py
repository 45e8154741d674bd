"""Refuse training in eight or four bits on devices without it, before anything is built."""

from __future__ import annotations

from typing import Protocol

from anytron.base.errors import ConfigError


class _Quantisation(Protocol):
    fp8: str | None
    fp4: str | None


def refuse_missing_quantisation(config: _Quantisation) -> None:
    """Ask Transformer Engine, the real or the portable one, whether it has the configured number format.

    Without this check Megatron would fail in the first forward pass, after trajectories have been generated.

    Raises:
        ConfigError: FP8 or FP4 is configured and Transformer Engine lacks FP8, which FP4 needs as well.
    """
    asked = [name for name in ("fp8", "fp4") if getattr(config, name)]
    if not asked:
        return
    from transformer_engine.pytorch.fp8 import check_fp8_support

    supported, reason = check_fp8_support()
    if not supported:
        raise ConfigError(
            "This device cannot train in this number format.",
            where=", ".join(f"engine.options.transformer.{name}={getattr(config, name)}" for name in asked),
            why=reason,
            fix="set it to null and train in bfloat16 or float32",
        )
