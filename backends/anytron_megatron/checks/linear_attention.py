"""What Megatron would refuse after minutes, or compute wrongly, of recurrent layers. Light to import."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from anytron.config.diagnostics import Diagnostic

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anytron.config.schema import RunConfig

CLASSES = "USE_MCORE_GDN"
"""Environment variable of mcore-bridge (config/parser.py): 0 builds Hugging Face's layers instead of Megatron's."""
_FALSE = ("0", "n", "no", "f", "false", "off")


def has_linear_attention(model: Mapping[str, Any]) -> bool:
    """Whether a Hugging Face config (of the language model) describes recurrent layers."""
    return "linear_attention" in (model.get("layer_types") or ()) or bool(model.get("linear_num_value_heads"))


def linear_attention_diagnostics(config: RunConfig, model: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """Hold the parallel sizes, the format and mcore-bridge's switch against a model with Gated DeltaNet.

    Args:
        config: The run.
        model: The Hugging Face config of the language model; empty if there is none.
    """
    if not has_linear_attention(model):
        return
    if config.parallel.context_parallel_size > 1:
        # megatron/core/transformer/transformer_config.py, line 974.
        yield Diagnostic(
            "error",
            "parallel.context_parallel_size",
            "Gated DeltaNet carries its state along the whole sequence, and Megatron does not pass it between ranks",
            "set parallel.context_parallel_size=1",
        )
    tensor = config.parallel.tensor_model_parallel_size
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        if model.get(name, 0) % tensor:
            yield Diagnostic(
                "error",
                "parallel.tensor_model_parallel_size",
                f"{name} {model[name]} cannot be split over {tensor} ranks",
                f"use a size that divides {model[name]}",
            )
    if config.engine.deterministic and config.engine.sequence_format == "thd":
        # mcore_bridge/model/modules/gated_delta_net.py, lines 323 and 399: both are assertions.
        yield Diagnostic(
            "error",
            "engine.deterministic",
            "Megatron's deterministic Gated DeltaNet takes no packed sequences",
            "set engine.sequence_format=bshd",
        )
    if os.environ.get(CLASSES, "1").lower() in _FALSE:
        yield Diagnostic(
            "error",
            "engine.name",
            f"{CLASSES}={os.environ[CLASSES]} builds layers that are handed no mask and are not split over ranks",
            f"unset {CLASSES}",
        )
