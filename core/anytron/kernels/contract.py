"""The contract of kernels: what each is built from, what it is called with, and what it returns.

These rules hold for every kernel. Operands and incoming gradients may have any strides, and no kernel but ``adam``
may overwrite them. Results are on the operands' device. Random numbers are drawn for dropout only, from the
device's default generator, because recomputation restores its state.

Even if there are no rows to compute, the results must depend on all operands in autograd (:func:`zeros_from`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from anytron.base.traits import ModelTraits


@dataclass(frozen=True)
class AttentionSpec:
    """Properties of an attention layer on which the choice of a kernel may depend.

    Attributes:
        num_heads: Query heads on this rank.
        num_kv_heads: Key and value heads on this rank (grouped-query attention).
        qk_dim: Query and key head size.
        v_dim: Value head size of the model. In packed multi-latent attention (MLA) the caller pads values with zeros
            to ``qk_dim``; the result must be as wide as the values that the call passes.
        scale: Factor of the scores before softmax.
        traits: Properties of the model, such as causal attention. ``traits.window`` is the layer's sliding window. It
            is not in the calls: a kernel must hide the keys outside of it, whatever the mode and the mask say.
        dropout: Attention dropout while training.
        sinks: Whether a learnt logit per head is added to the softmax's denominator (attention sinks).
        device_type: ``torch.device`` type of the operands.
        invariant: Whether the kernel must be company-invariant: the bits of a row's result must not depend on what else
            is in the call (:mod:`anytron.kernels.invariant`).
    """

    num_heads: int
    num_kv_heads: int
    qk_dim: int
    v_dim: int
    scale: float
    traits: ModelTraits
    dropout: float = 0.0
    sinks: bool = False
    device_type: str = "cpu"
    invariant: bool = False


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of an attention kernel that change from call to call.

    Attributes:
        format: ``thd`` (cumulative lengths given) or ``bshd``.
        mode: How to read the mask. In the language model's self-attention it is the ``kernel_mode`` of the mask that
            ``build_attn_mask`` returned. In other layers (cross-attention, vision towers) it is a neutral mode: a value
            of Transformer Engine's ``attn_mask_type``. So a kernel with its own modes must know the neutral modes too
            (:func:`anytron.kernels.attention.is_causal` reads them).
        mode_from: The plugin that chose ``mode``, for messages; empty if no plugin chose it.
        cu_seqlens_q: thd: int32 ``[B + 1]`` cumulative real query lengths, with a leading 0.
        cu_seqlens_kv: thd: int32 ``[B + 1]`` cumulative real key lengths, with a leading 0.
        cu_seqlens_q_padded: thd: int32 ``[B + 1]`` rows of the buffer at which sequences start; None = there is no
            padding between sequences, so that they start at ``cu_seqlens_q``.
        cu_seqlens_kv_padded: thd: the same for keys.
        max_seqlen_q: thd: upper bound of the query lengths; None = not known.
        max_seqlen_kv: thd: upper bound of the key lengths; None = not known.
        mask: bshd: the mask's tensor, bool, broadcastable to ``[B, H, Sq, Sk]``, True = MASKED; None without one.
            With a causal mode, a pair is hidden if the mask or causality hides it.
        sinks: float ``[H]`` logits of the attention sinks; None if the layer has none.
        dropout: Probability of dropping an attention weight in this call (0 in evaluation).
    """

    format: Literal["thd", "bshd"]
    mode: str
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    mask: Tensor | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0
    mode_from: str = ""


class AttentionKernel(Protocol):
    """Compute scaled dot-product attention.

    ``query`` is ``[T, H, D]`` in thd and ``[B, S, H, D]`` in bshd, ``key`` and ``value`` alike with
    ``num_kv_heads`` heads; query head ``h`` reads key head ``h // (H / num_kv_heads)``. The result is ``[T, H, Dv]`` or
    ``[B, S, H, Dv]``, with the query's element type.

    - In thd the buffer may end in padding and have padding between sequences, whose numbers mean nothing and
      may be NaN. Padding rows and rows that see no key give zeros and no gradient, never NaN.
    - Where queries and keys differ in number, as in context parallelism, a sequence's last query stands at its last
      key: causality is aligned bottom right. (``is_causal`` of torch's ``scaled_dot_product_attention`` is top left.)
      A sequence may be empty.
    - Only ``call.mode`` says whether the call is causal, even in a causal model: with a mode that is not causal, the
      mask tensor hides later keys, if they have to be hidden.
    - A kernel is called for many micro-batches, again in recomputation, and on other threads. It must take all that it
      needs from the arguments of the call.
    """

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        """Compute the attention of one call; the shapes are those in the description of the class."""


class KernelName(str, Enum):
    """The fused kernels that a platform may supply.

    Each has the signature of its neutral default in :mod:`anytron.kernels.fused`.
    """

    LINEAR = "linear"
    RMS_NORM = "rms_norm"
    LAYER_NORM = "layer_norm"
    SWIGLU = "swiglu"
    ROPE = "rope"
    GROUPED_MM = "grouped_mm"
    CAUSAL_CONV1D = "causal_conv1d"
    GATED_DELTA_RULE = "gated_delta_rule"
    STATE_SPACE_SCAN = "state_space_scan"
    ADAM = "adam"


WITHOUT_INVARIANCE = (KernelName.CAUSAL_CONV1D, KernelName.GATED_DELTA_RULE, KernelName.STATE_SPACE_SCAN)
"""Kernels of which there is no company-invariant form: models that need them are refused where it is asked for."""
NEVER_INVARIANT = (*WITHOUT_INVARIANCE, KernelName.ADAM)
"""Kernels that are never asked to be company-invariant: those, and ``adam``, which has no rows."""


@dataclass(frozen=True)
class KernelSpec:
    """Properties on which the choice of a fused kernel may depend.

    Attributes:
        device_type: ``torch.device`` type of the operands.
        dtype: Element type of the weights or of the operands (``adam``: float32, the type of the master weights);
            None = not known.
        options: Arguments that are known in advance and are the same in each call of the kernel. ``rms_norm`` and
            ``layer_norm`` have ``eps`` (float) and ``zero_centered`` (bool); other kernels have no options.
        invariant: As :attr:`AttentionSpec.invariant`; False for :data:`NEVER_INVARIANT`.
    """

    device_type: str
    dtype: torch.dtype | None = None
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    invariant: bool = False


@dataclass(frozen=True)
class LogProbSpec:
    """Properties on which the choice of the log-prob kernel may depend.

    Attributes:
        vocab_size: Real entries of the vocabulary; logits of padding entries are excluded.
        tensor_parallel: Ranks that share the vocabulary.
        chunk_tokens: Limit of the logits that exist at one time: at most as many as this many tokens have over the
            vocabulary entries of one rank.
        device_type: ``torch.device`` type of the operands.
        dtype: Element type of the operands; None = not known.
        invariant: As :attr:`AttentionSpec.invariant`.
    """

    vocab_size: int
    tensor_parallel: int
    chunk_tokens: int
    device_type: str = "cpu"
    dtype: torch.dtype | None = None
    invariant: bool = False


class LogProbKernel(Protocol):
    """Compute token log-probabilities and entropies from hidden states.

    Args:
        hidden: ``[N, H]``, the same on all tensor-parallel ranks; N may be 0.
        weight: ``[V / tp, H]``, this rank's rows of the output layer: rank r of the group has the rows from
            ``r * V / tp`` on. V may be larger than ``LogProbSpec.vocab_size``: the rows from ``vocab_size`` on, which
            are on the last ranks, are padding. They have no probability and get a gradient of 0.
        labels: int64 ``[N]`` global token ids; negative = ignored (log-prob and entropy 0, no gradient of either).
        temperature: Logits are divided by it, for log-probs and entropies.
        group: Tensor-parallel group; None or a group of one rank = not parallel.

    Returns:
        log-probs float32 ``[N]`` and entropies float32 ``[N]``, both differentiable, both complete
        on every rank. The gradient of ``hidden`` is this rank's part only (to be summed over the
        group, as Megatron's copy-to-region does in its backward pass).
    """

    def __call__(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, group: ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        """Return (log-probs, entropies)."""


class KernelSource(Protocol):
    """The source of the layers' kernels: the facade over all plugins, or an object with the same methods.

    If it has an attribute ``invariant`` that is True, its kernels are company-invariant, whatever a spec says.
    """

    def attention_kernel(self, spec: AttentionSpec) -> AttentionKernel:
        """Supply the attention kernel of a layer."""

    def fused_kernel(self, name: KernelName, spec: KernelSpec) -> Callable[..., Any]:
        """Supply a fused kernel; its signature is that of the neutral default in :mod:`anytron.kernels.fused`."""

    def log_prob_kernel(self, spec: LogProbSpec) -> LogProbKernel:
        """Supply the kernel that computes token log-probs and entropies."""


def zeros_from(shape: Sequence[int], first: Tensor, *others: Tensor | None) -> Tensor:
    """Return zeros that depend on operands, so that each operand gets a gradient of zeros instead of none.

    A rank whose output depends on no operand would skip the backward pass with its collectives, in which the other
    ranks would wait for ever.

    Args:
        shape: Shape of the result.
        first: Operand with the element type and device of the result.
        others: The other operands; None is skipped.
    """
    zeros = first.new_zeros(tuple(shape))
    for operand in (first, *others):
        if operand is not None:
            zeros = zeros + operand.flatten()[:0].sum()  # not 0 times a number, which may be NaN
    return zeros
