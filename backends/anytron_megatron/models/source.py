"""Sources from which the engine builds its models; a training engine of your own can use others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    import torch
    from megatron.core.transformer import TransformerConfig
    from torch import Tensor, nn

    from anytron.base.traits import AttentionHeads, ModelTraits
    from anytron.config.schema import ModelPart
    from anytron.sequences.masks import MaskKind
    from anytron_megatron.training.vision import VisionInputs


class ModelSource(Protocol):
    """One Hugging Face model directory: its properties, its Megatron modules, and its weights in both directions."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary, without padding."""

    @property
    def context_length(self) -> int:
        """Longest sequence that the model can take, in tokens."""

    @property
    def traits(self) -> ModelTraits:
        """Properties of the model that determine the mask it needs."""

    @property
    def attention_heads(self) -> AttentionHeads | None:
        """Sizes of the model's full attention; None if neither the platform's masks nor its kernels reach it."""

    @property
    def vision(self) -> VisionInputs | None:
        """How the model takes images; None if it takes none."""

    @property
    def parts(self) -> Mapping[ModelPart, Sequence[str]]:
        """Prefixes of parameters' names for each part of a vision-language model; empty for other models."""

    @property
    def fp8(self) -> bool:
        """Whether the model computes in FP8, whose kernels need padded sequences."""

    @property
    def experts_config(self) -> TransformerConfig | None:
        """Config of a mixture of experts whose auxiliary losses and routing the engine handles.

        None = the model is dense, or the model itself handles its auxiliary losses and routing.
        """

    def accepted_masks(self, sequence_format: str, *, portable: bool) -> frozenset[MaskKind]:
        """Return the kinds of mask that can reach the model's attention, in portable modules or a vendor's."""

    def build(self, device: torch.device, check: Callable[[list[nn.Module]], object] | None = None) -> list[nn.Module]:
        """Build this rank's model chunks and load their weights. A collective.

        Args:
            device: Device of the chunks.
            check: Called with the chunks before their weights are read; may raise to refuse the model. None = no check.

        Raises:
            EngineError: The weights in the directory do not match the model.
        """

    def export(self, chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights under their Hugging Face names, on the host, on rank 0.

        A collective: every rank must exhaust the iterator; other ranks yield nothing. A tensor may be a view of a
        parameter.
        """

    def prediction_names(self, names: Iterable[str]) -> frozenset[str]:
        """Find the exported tensors that belong to multi-token prediction modules."""

    def save(self, chunks: Sequence[nn.Module], path: Path) -> None:
        """Write a Hugging Face model directory: safetensors and config. A collective."""

    def close(self) -> None:
        """Delete process-global state that outlives the models; the engine calls this for the policy when it closes."""


@runtime_checkable
class AdapterSource(ModelSource, Protocol):
    """A source of models to which low-rank adapters can be attached."""

    @property
    def model_dir(self) -> Path:
        """The model directory, which an adapter names as its base."""

    def export_adapters(self, chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters' weights under PEFT's names. A collective, as :meth:`ModelSource.export`."""

    def load_adapters(self, chunks: Sequence[nn.Module], directory: Path) -> None:
        """Load adapters in PEFT's format into the model's adapters.

        Raises:
            EngineError: Layers that Megatron joins into one, such as ``q_proj`` and ``k_proj``, have different ``A`` on
                disk.
        """


def text_model(chunk: nn.Module) -> Any:
    """Return the language model of a chunk, a ``GPTModel``: a part of a vision-language model, or the chunk itself."""
    return getattr(chunk, "language_model", chunk)
