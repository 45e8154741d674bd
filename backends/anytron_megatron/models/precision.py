"""Refuse eight- and four-bit training before anything is built, where the device cannot do it."""

from __future__ import annotations

from typing import Protocol

from anytron.errors import ConfigError


class _Quantisation(Protocol):
    fp8: str | None
    fp4: str | None


def refuse_missing_quantisation(config: _Quantisation) -> None:
    """Ask Transformer Engine, the real or the portable one, whether it can compute what is configured.

    Without this Megatron fails at the first forward, when trajectories have been generated already.

    Raises:
        ConfigError: FP8 or FP4 is asked for and Transformer Engine has no FP8, which FP4 needs as well.
    """
    asked = [name for name in ("fp8", "fp4") if getattr(config, name)]
    if not asked:
        return
    from transformer_engine.pytorch.fp8 import check_fp8_support

    supported, reason = check_fp8_support()
    if not supported:
        raise ConfigError(
            "This number format cannot be trained in here.",
            where=", ".join(f"engine.options.transformer.{name}={getattr(config, name)}" for name in asked),
            why=reason,
            fix="set it to null and train in bfloat16 or float32",
        )
