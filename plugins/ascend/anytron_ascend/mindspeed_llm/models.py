"""Build models as MindSpeed-LLM's own scripts do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.training.arguments import core_transformer_config_from_args

from anytron_ascend.mindspeed_llm.process_state import layer_specification

if TYPE_CHECKING:
    from argparse import Namespace

    import torch


def build_model(arguments: Namespace, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """Build this rank's pipeline stage (``model_provider`` of MindSpeed-LLM's pretrain_gpt.py).

    Args:
        arguments: Those in force.
        device: Where it belongs; norms and routers are made on the host.
        dtype: Element type of all parameters.

    Returns:
        The model, its weights not read yet.
    """
    config = core_transformer_config_from_args(arguments)
    model: torch.nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=layer_specification(),
        vocab_size=arguments.padded_vocab_size,
        max_sequence_length=arguments.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=not arguments.untie_embeddings_and_output_weights,
        position_embedding_type=arguments.position_embedding_type,
        rotary_percent=arguments.rotary_percent,
        rotary_base=arguments.rotary_base,
    )
    return model.to(device=device, dtype=dtype)
