"""The training engine ``mindspeed_llm``: Megatron's, over MindSpeed-LLM's models with Hugging Face weights."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.global_vars import get_args
from safetensors import SafetensorError

from anytron import EngineError, ModelTraits
from anytron.engines import load_hf_config, read_hf_config
from anytron.sequences import MaskKind
from anytron_ascend.mindspeed_llm.arguments import translate
from anytron_ascend.mindspeed_llm.options import MindSpeedLlmOptions
from anytron_ascend.mindspeed_llm.process_state import install_arguments, layer_specification, uninstall_arguments
from anytron_megatron import MegatronEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn


_LOADING_FAILS = (KeyError, AssertionError, RuntimeError, ValueError, OSError, SafetensorError)
"""Errors that mbridge raises when a tensor is missing or has another shape."""

VALUE_HEAD = "value_head."
"""Beginning of the names of a critic's head (:class:`anytron_megatron.critic.ValueHead`)."""

_ONE_BY_ONE = re.compile(r"\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")


class MindSpeedLlmEngine(MegatronEngine):
    """Train one policy, and the critic of PPO, as models of MindSpeed-LLM; score tokens."""

    def prepare_platform(self) -> None:
        """Install all arguments of the run for MindSpeed-LLM, and let it apply its patches for them."""
        config = self._context.config
        options = MindSpeedLlmOptions.model_validate(config.engine.options)
        model = load_hf_config(config.model)
        install_arguments(translate(config, model, options), self._context.stack.ledger)

    def open_source(self, directory: Path, *, policy: bool) -> MindSpeedLlmSource:
        """Open a model directory, of the policy or the critic."""
        del policy
        return MindSpeedLlmSource(directory, getattr(torch, self._context.config.model.dtype))


class MindSpeedLlmSource:
    """One Hugging Face model directory as a model of MindSpeed-LLM.

    Implements :class:`anytron_megatron.models.source.ModelSource`. The arguments are those that the adaptor has
    installed in this process.

    Args:
        directory: Directory with ``config.json`` and safetensors files.
        dtype: Element type of parameters and activations.
    """

    attention_heads = None
    """Masks and kernels of the platform do not reach the attention; other checks of ``anytron verify`` cover it."""
    vision = None
    fp8 = False
    experts_config = None
    """MindSpeed-LLM balances the load of experts itself, and their routing is not replayed."""

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
        """Build this rank's pipeline stage (``model_provider`` of MindSpeed-LLM's pretrain_gpt.py), with weights."""
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
        first = dist.get_rank() == 0
        for name, tensor in self._weights.export(chunks):
            if first:
                yield name, tensor.cpu()

    def prediction_names(self, names: Iterable[str]) -> frozenset[str]:
        """Return the empty set: the models have no multi-token prediction modules."""
        del names
        return frozenset()

    def save(self, chunks: Sequence[nn.Module], path: Path) -> None:
        """Write a Hugging Face model directory: sharded safetensors and config. A collective."""
        tensors = {name: tensor.contiguous() for name, tensor in self.export(chunks)}
        if dist.get_rank() == 0:
            path.mkdir(parents=True, exist_ok=True)
            save_torch_state_dict(tensors, path)
            self._weights.hf_config.save_pretrained(path)
        dist.barrier()

    def close(self) -> None:
        """Let the next engine of this process install other arguments."""
        uninstall_arguments()


class HuggingFaceWeights:
    """The weights of one model directory, read and exported by mbridge.

    Args:
        directory: Directory with ``config.json`` and safetensors files.
        dtype: Element type of the parameters.
        padded_vocab_size: Rows of embedding and output layer, over all tensor-parallel ranks.

    Raises:
        EngineError: mbridge does not know the model type.
    """

    def __init__(self, directory: Path, *, dtype: torch.dtype, padded_vocab_size: int) -> None:
        from mbridge import AutoBridge

        self.hf_config = read_hf_config(directory)
        self._directory = directory
        try:
            self._bridge: Any = AutoBridge.from_config(self.hf_config, dtype=dtype, make_vocab_size_divisible_by=1)
        except (KeyError, ValueError, NotImplementedError) as error:
            raise EngineError(
                "The weights of this model family cannot be read.",
                where=str(directory / "config.json"),
                why=f"mbridge does not know model_type '{self.hf_config.model_type}': {error}",
                fix="use a model of a family that mbridge has, for example qwen3",
            ) from error
        # For a model with tied embeddings mbridge changes the table of its class, for every model to come
        # (mbridge/models/qwen2.py, _adjust_mapping_for_shared_weights).
        head = "model.embed_tokens.weight" if self.hf_config.tie_word_embeddings else "lm_head.weight"
        self._bridge._DIRECT_MAPPING = {**self._bridge._DIRECT_MAPPING, "output_layer.weight": head}
        self._bridge.vocab_size = self.hf_config.vocab_size
        self._bridge.padded_vocab_size = padded_vocab_size

    @torch.no_grad()
    def load(self, chunks: Sequence[nn.Module]) -> None:
        """Read the directory into the models. A collective.

        Every parameter is first filled with NaN, so that one that was not read is found.

        Raises:
            EngineError: On all ranks, if a tensor is missing or has a wrong shape on any rank, or a file is damaged.
        """
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.fill_(torch.nan)
        failure = ""
        try:
            self._bridge.load_weights([_Named(chunk) for chunk in chunks], str(self._directory))
        except _LOADING_FAILS as error:
            failure = f"{type(error).__name__}: {error}"
        unfilled = [name for chunk in chunks for name, value in chunk.named_parameters() if value.isnan().any()]
        if not failure and unfilled:
            failure = f"{len(unfilled)} of the model's parameters were not fully loaded, for example {min(unfilled)}"
        failures: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
        if any(failures):
            raise EngineError(
                "The weights do not match the model.",
                where=str(self._directory),
                why=next(filter(None, failures)),
                fix="use the weights that belong to this config.json, or complete the download",
            )

    @torch.no_grad()
    def export(self, chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights under their Hugging Face names, whole, on the device, on every rank. A collective."""
        yield from self._bridge.export_weights([_Named(chunk) for chunk in chunks])


class _Named:
    """A model whose parameters have the names that mbridge expects, without a critic's head.

    Experts that are computed one by one are numbered like the experts of a grouped matrix product.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        if hasattr(model, "decoder"):
            self.decoder = model.decoder

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        named = ((_numbered(name), parameter) for name, parameter in self._model.named_parameters())
        return ((name, parameter) for name, parameter in named if not name.startswith(VALUE_HEAD))

    def state_dict(self) -> dict[str, Any]:
        named = ((_numbered(name), value) for name, value in self._model.state_dict().items())
        return {name: value for name, value in named if not name.startswith(VALUE_HEAD)}


def _numbered(name: str) -> str:
    return _ONE_BY_ONE.sub(r".experts.\2.weight\1", name)
