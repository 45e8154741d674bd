"""Torch's own FlashAttention for sequences of different lengths, with or without sinks.

Sources, in torch 2.13: torch/nn/attention/varlen.py; the operators' checks are in
aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, GPUs and head sizes in
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp. Before 2.12, ``varlen_attn`` has no
grouped queries; in 2.10, it has no windows and no scale either (docs.pytorch.org/docs/2.10/nn.attention.varlen.html,
and 2.12).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version

from anytron_cuda.attention.packed import padded_heads

if TYPE_CHECKING:
    from torch import Tensor

    from anytron.kernels import AttentionSpec
    from anytron_cuda.attention.packed import Sequences
    from anytron_cuda.capabilities import Capabilities

OLDEST = Version("2.12")
GPUS = ((8, 0), (12, 1))
"""Oldest and newest compute capability (``check_flash_attention_hardware_support``)."""
LARGEST_HEAD = 256
CONSUMER_GPUS = ((8, 6), (8, 7), (8, 8), (8, 9), (12, 0), (12, 1))
"""GPUs without a backward pass for heads of 193 to 224 elements
(``check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120``)."""


def obstacle(offered: Capabilities, spec: AttentionSpec) -> str | None:
    """Return why ``varlen_attn`` cannot compute a layer; None if it can."""
    if offered.torch < OLDEST:
        return f"it requires torch {OLDEST} or later, and torch {offered.torch} is installed"
    if not GPUS[0] <= offered.compute_capability <= GPUS[1]:
        return "it needs a GPU of compute capability {}.{} to {}.{}".format(*GPUS[0], *GPUS[1])
    if spec.dropout:
        return "it does not support dropout"
    largest = max(spec.qk_dim, spec.v_dim)
    if largest > LARGEST_HEAD:
        return f"it supports heads of at most {LARGEST_HEAD} elements, and this layer has {largest}"
    if 192 < largest <= 224 and offered.compute_capability in CONSUMER_GPUS:
        return "on this GPU it has no backward pass for heads of 193 to 224 elements"
    return None


def attend(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
    """Compute attention for :func:`anytron_cuda.attention.packed.make_packed`, with head sizes up to 256."""
    query, key, padded = padded_heads(query, key, value)
    if sequences.sinks is not None:
        with_sinks: Tensor = _WithSinks.apply(query, key, padded, sequences.sinks, sequences)  # type: ignore[no-untyped-call]
        return with_sinks[..., : value.shape[-1]]
    from torch.nn.attention.varlen import varlen_attn

    output = varlen_attn(
        query,
        key,
        padded,
        sequences.cu_seqlens_q,
        sequences.cu_seqlens_k,
        sequences.max_seqlen_q,
        sequences.max_seqlen_k,
        scale=sequences.scale,
        window_size=sequences.window,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, torch.Tensor)  # a tuple only where log-sum-exps are asked for
    return output[..., : value.shape[-1]]


class _WithSinks(torch.autograd.Function):
    """One more logit per head in the softmax's denominator, which carries no value.

    With L the log-sum-exp of a row and s the sink, weights shrink by ``exp(L - L')``, L' being ``log(exp L + exp s)``,
    and so does the output. The backward pass of FlashAttention makes the weights anew from the log-sum-exp and needs
    the output for the rows' sums of ``dO * O``: given L' and the shrunken output, it is exact. ``varlen_attn`` cannot
    be given them, and its log-sum-exp has no gradient: hence the operators below it.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, sequences: Sequences) -> Tensor:
        output, row_sums, *_ = torch.ops.aten._flash_attention_forward(
            query,
            key,
            value,
            *sequences[:4],
            0.0,
            sequences.window == (-1, 0),
            False,
            scale=sequences.scale,
            window_size_left=sequences.window[0],
            window_size_right=sequences.window[1],
        )
        # Log-sum-exps are float32 [H, Tq]; that of a row which sees no key is infinite, and its output zero.
        row_sums = row_sums.masked_fill(row_sums == torch.inf, -torch.inf)
        with_sinks = torch.logaddexp(row_sums, sinks.float()[:, None])
        scaled: Tensor = (output * (row_sums - with_sinks).exp().t()[..., None]).to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, scaled, with_sinks)
        ctx.sequences = sequences
        return scaled

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        query, key, value, sinks, output, with_sinks = ctx.saved_tensors
        sequences = ctx.sequences
        grads = torch.ops.aten._flash_attention_backward(
            grad.contiguous(),
            query,
            key,
            value,
            output,
            with_sinks,
            *sequences[:4],
            0.0,
            sequences.window == (-1, 0),
            torch.zeros(2, dtype=torch.uint64, device=query.device),
            torch.empty(0, device=query.device),
            scale=sequences.scale,
            window_size_left=sequences.window[0],
            window_size_right=sequences.window[1],
        )
        weights = (sinks.float()[:, None] - with_sinks).exp()
        grad_sinks = -(weights * (grad.float() * output.float()).sum(-1).t()).sum(1)
        return (*grads, grad_sinks.to(sinks.dtype), None)
