"""The toy's kernels: short, slow, and right."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from anytron.kernels.neutral_modes import is_causal
from anytron_toy import vendor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from anytron.kernels.contract import AttentionCall, AttentionKernel, AttentionSpec


LENGTHS = "toy_lengths"
"""The toy's own kernel mode: causal attention in sequences whose lengths the vendor's library was told."""


class LoopedAttention:
    """Attend sequence by sequence with torch's own kernel."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        """Give ``[T, H, Dv]`` in thd and ``[B, S, H, Dv]`` in bshd."""
        causal = call.mode == LENGTHS or is_causal(call, "toy's attention kernel")
        if call.format == "bshd":
            hidden = torch.zeros((), dtype=torch.bool, device=query.device) if call.mask is None else call.mask
            hidden = hidden.expand(len(query), query.shape[2], query.shape[1], key.shape[1])
            rows = zip(query, key, value, hidden, strict=True)
            return torch.stack([self._attend(q, k, v, causal, row) for q, k, v, row in rows])
        queries = _parts(call.cu_seqlens_q, call.cu_seqlens_q_padded)
        keys = _parts(call.cu_seqlens_kv, call.cu_seqlens_kv_padded)
        lengths = [part.stop - part.start for part in queries]
        if call.mode == LENGTHS and lengths != vendor.ACTUAL_LENGTHS:
            raise RuntimeError(f"toy: the library was told {vendor.ACTUAL_LENGTHS}, sequences are {lengths}")
        out = query.new_zeros(*query.shape[:-1], self.spec.v_dim)
        for of_queries, of_keys in zip(queries, keys, strict=True):
            out[of_queries] = self._attend(query[of_queries], key[of_keys], value[of_keys], causal)
        return out

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, causal: bool, hidden: Tensor | None = None) -> Tensor:
        heads_first = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        # torch's is_causal is aligned to the first query and the first key, ours to the last ones.
        seen = torch.ones(len(query), len(key), dtype=torch.bool, device=query.device)
        seen = seen.tril(len(key) - len(query)) if causal else seen
        seen = seen if hidden is None else seen & ~hidden
        out = functional.scaled_dot_product_attention(
            *heads_first, attn_mask=seen, scale=self.spec.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)


def read_toy_mode(attend: AttentionKernel) -> AttentionKernel:
    """Let a kernel of the neutral modes read the toy's as well."""

    def reading(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        mode = "padding_causal" if call.mode == LENGTHS else call.mode
        return attend(query, key, value, replace(call, mode=mode))

    return reading


def _parts(lengths: Tensor, starts: Tensor | None) -> list[slice]:
    """Where each sequence lies in the buffer."""
    begins = (lengths if starts is None else starts)[:-1]
    return [slice(*ends) for ends in torch.stack([begins, begins + lengths.diff()], dim=1).tolist()]


def swiglu(gate_and_up: Tensor) -> Tensor:
    """Multiply the activated first half with the second half of the last dimension."""
    gate, up = gate_and_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def log_probs(
    entries: int, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, group: ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Give log-probs and entropies ``[N]`` from all logits at once, for a vocabulary of so many entries on one rank."""
    assert group is None or group.size() == 1
    logits = (hidden @ weight[:entries].T).float() / temperature
    every = logits.log_softmax(-1)
    chosen = every.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    entropy = -(every.exp() * every).sum(-1)
    real = labels >= 0
    return torch.where(real, chosen, 0.0), torch.where(real, entropy, 0.0)
