"""All of MindSpeed's arguments, for one engine.

They are process-wide and persist: an engine inherits what it leaves out from the one before. So each
engine gets a whole set, MindSpeed's defaults included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anytron import ParallelSizes
    from anytron_ascend.options import MindSpeedOptions


def engine_arguments(defaults: Mapping[str, Any], sizes: ParallelSizes, options: MindSpeedOptions) -> dict[str, Any]:
    """Return every argument of an engine: ``defaults`` (MindSpeed's own), its sizes, and what the options ask for."""
    return {
        **defaults,
        "tensor_model_parallel_size": sizes.tensor,
        "pipeline_model_parallel_size": sizes.pipeline,
        "context_parallel_size": sizes.context,
        "expert_model_parallel_size": sizes.expert,
        "expert_tensor_parallel_size": sizes.expert_tensor,
        "sequence_parallel": sizes.sequence_parallel,
        "context_parallel_algo": options.context_parallel_algo,
        "transformer_impl": "transformer_engine",
        "multi_latent_attention": False,
        "use_flash_attn": True,
        # A mask and its mode come together, call by call (anytron_ascend.mindspeed.attention); these hold
        # for calls without a mask: MindSpeed's compressed triangle, left-up causal.
        "attention_mask_type": "causal",
        "sparse_mode": 2,
        # With context parallelism MindSpeed would put a Gated DeltaNet of its own in the place of Megatron's, and it
        # would be the parent of mcore-bridge's layer or not, by which of the two was imported first.
        "gated_delta_net": False,
    }
