"""The properties of a model, and of its split over ranks, that determine what its layers need."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelTraits:
    """Properties of a model that determine the mask it needs.

    Attributes:
        causal: A token sees only itself and earlier tokens.
        vision: The model takes images, and puts their embeddings into the sequence itself.
        latent_attention: Multi-latent attention (MLA); value and query head sizes may differ.
        linear_attention: Some layers are recurrent (Gated DeltaNet, Mamba-2) and must not see padding.
        mixture_of_experts: Some layers route tokens to experts; padding must not be routed.
        window: Sliding window ``(left, right)`` in tokens, -1 = unlimited; None = no window.
        sparse_attention: Some layers choose each token's keys (DeepSeek sparse attention); they are causal, and take no
            mask.
    """

    causal: bool = True
    vision: bool = False
    latent_attention: bool = False
    linear_attention: bool = False
    mixture_of_experts: bool = False
    window: tuple[int, int] | None = None
    sparse_attention: bool = False


@dataclass(frozen=True)
class ParallelSizes:
    """How many ranks share each dimension of the work. Names as in Megatron-Core.

    Attributes:
        tensor: Ranks that share each layer.
        pipeline: Ranks that hold consecutive layers.
        context: Ranks that share each sequence.
        data: Copies of the model.
        expert: Ranks that share the experts of a mixture-of-experts layer.
        expert_tensor: Ranks that share each expert.
        virtual_pipeline: Pieces of the model on each pipeline rank.
        sequence_parallel: Activations are split between the tensor-parallel ranks outside of attention and the MLP.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual_pipeline: int = 1
    sequence_parallel: bool = False

    @property
    def model(self) -> int:
        """Ranks that together hold one copy of the model and one micro-batch."""
        return self.tensor * self.pipeline * self.context


@dataclass(frozen=True)
class AttentionHeads:
    """Sizes of a model's full attention, over all tensor-parallel ranks.

    Attributes:
        heads: Query heads.
        kv_heads: Key and value heads.
        qk_dim: Query and key head size.
        v_dim: Value head size.
    """

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
