"""Complete a published configuration, and refuse a number format that the device lacks, before a model is built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from anytron.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


COMPLETED = frozenset({"rope_type", "factor", "mscale", "mscale_all_dim"})
"""Rotary fields that mcore-bridge reads by subscript, and :func:`completed` fills in where a file lacks them."""


def completed(converted: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the rotary fields that mcore-bridge wants and a published configuration may lack, or have as null.

    The defaults are those of transformers: ``mscale_all_dim`` 0 leaves the scale of the softmax alone
    (``yarn_apply_mscale`` of its DeepSeek-V3), and where either ``mscale`` is 0 the embeddings are scaled by ``factor``
    alone, which is the ratio of the two context lengths if it is null (``_compute_yarn_parameters``).

    Args:
        converted: What ``hf_to_mcore_config`` returns, with ``rope_scaling``; neither is changed.
    """
    rotary = converted.get("rope_scaling")
    if not rotary or any(isinstance(value, dict) for value in rotary.values()):  # one for each type of layer
        return dict(converted)
    given = {key: value for key, value in rotary.items() if value is not None}
    whole: dict[str, Any] = {"rope_type": given.get("type", "default"), **given}
    if whole["rope_type"] == "yarn":
        first = given.get("original_max_position_embeddings", converted["max_position_embeddings"])
        stretched = converted["max_position_embeddings"] / first
        whole = {"factor": stretched, "mscale": 0.0, "mscale_all_dim": 0.0, **whole}
    return {**converted, "rope_scaling": whole}


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
