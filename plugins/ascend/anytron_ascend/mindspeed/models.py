"""Check that MindSpeed can train a run's model. Imports neither Megatron nor MindSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron import Diagnostic
from anytron_megatron import models_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron import RunConfig


def model_diagnostics(config: RunConfig) -> Iterator[Diagnostic]:
    """Refuse multi-latent attention with context parallelism.

    MindSpeed's ring attention takes no sizes of heads from a layer: ``CPDotProductAttentionImpl.__init__``
    (mindspeed/core/context_parallel/dot_product_attention.py) has neither ``k_channels`` nor ``v_channels``, and its
    class that has them stands in for ``kvallgather_cp_algo`` only (mindspeed/features_manager/context_parallel).
    """
    if config.parallel.context_parallel_size == 1:
        return
    for model in models_of(config):
        if model.text.get("kv_lora_rank"):
            yield Diagnostic(
                "error",
                "parallel.context_parallel_size",
                f"MindSpeed's ring attention has no multi-latent attention, which {model.key} has",
                "parallel.context_parallel_size=1, or platform.options.adaptor=none",
            )
