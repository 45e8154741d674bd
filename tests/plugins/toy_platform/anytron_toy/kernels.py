"""The toy's kernels: short, slow, and right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from anytron.kernels.neutral_modes import is_causal
from anytron_toy import vendor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from anytron.kernels.contract import AttentionCall, AttentionSpec


LENGTHS = "toy_lengths"
"""The toy's own kernel mode: causal attention in sequences whose lengths the vendor's library was told."""


class LoopedAttention:
    """Attend sequence by sequence with torch's own kernel."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        """Give ``[T, H, Dv]`` in thd and ``[B, S, H, Dv]`` in bshd."""
        causal = call.mode == LENGTHS or is_causal(call, "toy's attention kernel")
        assert call.mask is None
        if call.format == "bshd":
            return torch.stack([self._attend(q, k, v, causal) for q, k, v in zip(query, key, value, strict=True)])
        lengths, starts = call.cu_seqlens_q.diff().tolist(), call.cu_seqlens_q_padded.tolist()
        if call.mode == LENGTHS and lengths != vendor.ACTUAL_LENGTHS:
            raise RuntimeError(f"toy: the library was told {vendor.ACTUAL_LENGTHS}, sequences are {lengths}")
        out = query.new_zeros(*query.shape[:-1], self.spec.v_dim)
        for length, start in zip(lengths, starts, strict=False):
            part = slice(start, start + length)
            out[part] = self._attend(query[part], key[part], value[part], causal)
        return out

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        heads_first = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        out = functional.scaled_dot_product_attention(
            *heads_first, is_causal=causal, scale=self.spec.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)


def swiglu(gate_and_up: Tensor) -> Tensor:
    """Multiply the activated first half with the second half of the last dimension."""
    gate, up = gate_and_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, group: ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Give log-probs and entropies ``[N]`` from all logits at once, for a vocabulary on one rank."""
    assert group is None or group.size() == 1
    logits = (hidden @ weight.T).float() / temperature
    every = logits.log_softmax(-1)
    chosen = every.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    entropy = -(every.exp() * every).sum(-1)
    real = labels >= 0
    return torch.where(real, chosen, 0.0), torch.where(real, entropy, 0.0)
