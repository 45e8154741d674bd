"""What a platform may declare not to do: a feature, and the reason for the user whose run asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Feature(str, Enum):
    """What a platform may do or not; see ``Platform.limits``."""

    OWN_DEVICE = "own-device"
    """Memory and arithmetic apart from the processor's, which plays the device of a platform for development."""
    THD = "thd"
    """Packed sequences."""
    BSHD = "bshd"
    """Padded rows."""
    BFLOAT16 = "bfloat16"
    TENSOR_PARALLEL = "tensor-parallel"
    PIPELINE_PARALLEL = "pipeline-parallel"
    CONTEXT_PARALLEL = "context-parallel"
    EXPERT_PARALLEL = "expert-parallel"
    INTERLEAVED_PIPELINE = "interleaved-pipeline"
    """Several pieces of the model on each pipeline rank."""
    RECOMPUTE = "recompute"
    """Forward passes that are computed again in the backward pass."""
    LATENT_ATTENTION = "latent-attention"
    """Multi-latent attention (MLA)."""
    LINEAR_ATTENTION = "linear-attention"
    """Gated DeltaNet."""
    MIXTURE_OF_EXPERTS = "mixture-of-experts"
    ROUTER_REPLAY = "router-replay"
    """Routers that send tokens to experts that they are told."""
    MULTI_TOKEN_PREDICTION = "multi-token-prediction"  # noqa: S105 - no password
    """Modules that predict tokens further ahead (MTP), trained beside the policy."""
    ADAPTERS = "adapters"
    """Low-rank adapters (LoRA)."""
    CRITIC = "critic"
    """A second model with a value head."""
    VISION = "vision"
    SLIDING_WINDOW = "sliding-window"
    ATTENTION_SINKS = "attention-sinks"


@dataclass(frozen=True)
class Limit:
    """Something that a platform does not do; see ``Platform.limits``.

    Attributes:
        feature: What.
        reason: Why not, for the user whose run asks for it. No full stop.
    """

    feature: Feature
    reason: str
