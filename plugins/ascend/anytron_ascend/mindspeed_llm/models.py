"""MindSpeed-LLM's models: built as its own scripts build them, with the weights of a Hugging Face directory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import save_torch_state_dict
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.global_vars import get_args

from anytron import ModelTraits
from anytron.sequences import MaskKind
from anytron_ascend.mindspeed_llm.process_state import layer_specification, uninstall_arguments
from anytron_ascend.mindspeed_llm.weights import HuggingFaceWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn


class MindSpeedLlmSource:
    """One Hugging Face model directory as a model of MindSpeed-LLM.

    Implements :class:`anytron_megatron.models.source.ModelSource`. The arguments are those that the adaptor has
    installed in this process.

    Args:
        directory: With ``config.json`` and safetensors.
        dtype: Element type of parameters and activations.
    """

    attention_heads = None
    """Its attention is its own: the other checks of ``anytron verify`` cover it."""
    vision = None
    fp8 = False
    experts_config = None
    """Its experts balance their own load, and their routing is not replayed."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        self._arguments = get_args()
        self._dtype = dtype
        self._weights = HuggingFaceWeights(directory, dtype=dtype, padded_vocab_size=self._arguments.padded_vocab_size)
        self.vocab_size: int = self._arguments.vocab_size
        self.context_length: int = self._arguments.max_position_embeddings
        self.traits = ModelTraits(causal=True, mixture_of_experts=bool(self._arguments.num_experts))
        self.parts: Mapping[Any, Sequence[str]] = {}

    def accepted_masks(self, sequence_format: str, *, portable: bool) -> frozenset[MaskKind]:
        """Accept no tensor, in either format: the attention makes the compressed triangle itself."""
        del sequence_format, portable
        return frozenset({MaskKind.NONE})

    def build(self, device: torch.device, check: Callable[[list[nn.Module]], object] | None = None) -> list[nn.Module]:
        """Build this rank's pipeline stage (``model_provider`` of MindSpeed-LLM's pretrain_gpt.py), and load it."""
        arguments = self._arguments
        model: nn.Module = GPTModel(
            config=core_transformer_config_from_args(arguments),
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
        # Norms and routers are made on the host, in float32.
        chunks = [model.to(device=device, dtype=self._dtype)]
        if check is not None:
            check(chunks)
        self._weights.load(chunks)
        return chunks

    def export(self, chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights under their Hugging Face names, on the host, on rank 0. A collective."""
        first = torch.distributed.get_rank() == 0
        for name, tensor in self._weights.export(chunks):
            if first:
                yield name, tensor.cpu()

    def prediction_names(self, names: Iterable[str]) -> frozenset[str]:
        """Find nothing: the models have no multi-token prediction modules."""
        del names
        return frozenset()

    def save(self, chunks: Sequence[nn.Module], path: Path) -> None:
        """Write a Hugging Face model directory: sharded safetensors and config. A collective."""
        tensors = {name: tensor.contiguous() for name, tensor in self.export(chunks)}
        if torch.distributed.get_rank() == 0:
            path.mkdir(parents=True, exist_ok=True)
            save_torch_state_dict(tensors, path)
            self._weights.hf_config.save_pretrained(path)
        torch.distributed.barrier()

    def close(self) -> None:
        """Let the next engine of this process install other arguments."""
        uninstall_arguments()
