"""Check that Megatron can train a model's recurrent layers in this run. Imports no Megatron."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from anytron.config.diagnostics import Diagnostic

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anytron.config.schema import RunConfig
    from anytron_megatron.checks.subject import Subject

CLASSES = "USE_MCORE_GDN"
"""Environment variable of mcore-bridge (config/parser.py): 0 builds Hugging Face's layers instead of Megatron's."""
_FALSE = ("0", "n", "no", "f", "false", "off")


def _has_linear_attention(model: Mapping[str, Any]) -> bool:
    """Whether the Hugging Face config of a language model describes recurrent layers."""
    return "linear_attention" in (model.get("layer_types") or ()) or bool(model.get("linear_num_value_heads"))


def linear_attention_diagnostics(subject: Subject, run: RunConfig) -> Iterator[Diagnostic]:
    """Check parallel sizes, sequence format and mcore-bridge's switch for a model with Gated DeltaNet."""
    model = subject.text
    if not _has_linear_attention(model):
        return
    tensor, context = run.parallel.tensor_model_parallel_size, run.parallel.context_parallel_size
    if context > 1 and "linear_num_key_heads" not in model:
        yield Diagnostic(
            "error",
            "parallel.context_parallel_size",
            "its recurrent layers are not Gated DeltaNet, the only ones whose heads context-parallel ranks can divide",
            "set parallel.context_parallel_size=1",
        )
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        heads = model.get(name, 0)
        if heads % tensor:
            yield Diagnostic(
                "error",
                "parallel.tensor_model_parallel_size",
                f"{name} {heads} cannot be split over {tensor} ranks",
                f"use a size that divides {heads}",
            )
        elif heads % (tensor * context):
            # Context-parallel ranks share the heads of a tensor-parallel rank (patches/delta_net_context.py).
            yield Diagnostic(
                "error",
                "parallel.context_parallel_size",
                f"{name} {heads} cannot be split over {tensor * context} ranks, tensor parallel {tensor} times context "
                f"parallel {context}",
                f"use sizes whose product divides {heads}",
            )
    if run.engine.deterministic and run.engine.sequence_format == "thd":
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
            f"{CLASSES}={os.environ[CLASSES]} builds layers that get no mask and are not split over ranks",
            f"unset {CLASSES}",
        )
