"""Attention layers, and calls of their kernels, each with the float64 definition of its result."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from anytron.base.traits import ModelTraits
from anytron.device.platform import Feature
from anytron.kernels.attention import PACKED, PADDED
from anytron.kernels.contract import AttentionCall, AttentionSpec
from anytron.kernels.oracles.attention import attend_where, reference_attention
from anytron_conformance.kernels.comparison import Comparison, drawn

if TYPE_CHECKING:
    from anytron.kernels.contract import AttentionKernel
    from anytron_conformance.subject import Subject

SCALE = 0.4
"""Factor of the scores; it differs from every default of a kernel."""
FACTOR = {torch.float32: 1.0, torch.bfloat16: 3.0}
"""Factor of the usual tolerance: probabilities are rounded to 16 bits, and gradients are differences of such sums."""


@dataclass(frozen=True)
class Layer:
    """One attention layer.

    Attributes:
        heads: Number of query heads.
        groups: Number of heads of keys and values.
        size: Size of a head of queries and keys.
        v_size: Size of a head of values.
        causal: Whether keys that come after a query are hidden from it.
        window: (left, right) neighbours that a query sees; -1 = all.
        sinks: Whether a logit per head joins the softmax's denominator.
        pads_values: Whether values are padded with zeros to the size of queries, as in packed latent attention.
    """

    heads: int = 2
    groups: int = 2
    size: int = 16
    v_size: int = 16
    causal: bool = True
    window: tuple[int, int] | None = None
    sinks: bool = False
    pads_values: bool = False

    @property
    def traits(self) -> ModelTraits:
        """Properties of the model for the platform."""
        return ModelTraits(causal=self.causal, window=self.window, latent_attention=self.size != self.v_size)

    @property
    def needs(self) -> tuple[Feature, ...]:
        """Features that a platform must have to compute the layer."""
        wanted = {
            Feature.LATENT_ATTENTION: self.size != self.v_size,
            Feature.SLIDING_WINDOW: self.window is not None,
            Feature.ATTENTION_SINKS: self.sinks,
        }
        return tuple(feature for feature, needed in wanted.items() if needed)

    def kernel(self, subject: Subject, dropout: float = 0.0, *, invariant: bool = False) -> AttentionKernel:
        """The kernel that a model gets for such a layer, from any plugin."""
        spec = AttentionSpec(
            *(self.heads, self.groups, self.size, self.v_size, SCALE, self.traits),
            dropout=dropout,
            sinks=self.sinks,
            device_type=subject.device.type,
            invariant=invariant,
        )
        return subject.hooks.attention_kernel(spec)

    def operands(self, queries: tuple[int, ...], keys: tuple[int, ...]) -> dict[str, Tensor]:
        """Draw queries, keys and values with these leading shapes, and the sinks if there are any."""
        found = {
            "queries": drawn(*queries, self.heads, self.size),
            "keys": drawn(*keys, self.groups, self.size, seed=1),
            "values": drawn(*keys, self.groups, self.v_size, seed=2),
        }
        if self.pads_values:
            found["values"] = functional.pad(found["values"], (0, self.size - self.v_size))
        return {**found, "sinks": torch.linspace(-1, 2, self.heads)} if self.sinks else found


@dataclass(frozen=True)
class Packing:
    """Sequences in one buffer.

    Attributes:
        queries: Real length of each sequence.
        keys: Real keys of each sequence; None = as many as queries.
        gaps: Padding after each sequence, in the buffers of queries and of keys.
        tail: Padding at the end of the buffers.
        says_starts: Whether the call has ``cu_seqlens_*_padded``; without them, there must be no gaps.
        says_longest: Whether the call has ``max_seqlen_*``; False = they are None.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...] | None = None
    gaps: tuple[int, ...] = ()
    tail: int = 0
    says_starts: bool = True
    says_longest: bool = True

    @property
    def key_lengths(self) -> tuple[int, ...]:
        """Real keys of each sequence."""
        return self.queries if self.keys is None else self.keys

    def ends(self, lengths: tuple[int, ...]) -> list[int]:
        """Offsets of sequences of these lengths in the buffer; the last entry is the end of the last one's padding."""
        gaps = self.gaps or (0,) * len(lengths)
        return list(accumulate((length + gap for length, gap in zip(lengths, gaps, strict=True)), initial=0))

    def rows(self, lengths: tuple[int, ...]) -> int:
        """Number of rows of the buffer that holds sequences of these lengths, padding included."""
        return self.ends(lengths)[-1] + self.tail

    def padding(self, lengths: tuple[int, ...]) -> Tensor:
        """Rows of a buffer that belong to no sequence: bool ``[T]``."""
        real = torch.zeros(self.rows(lengths), dtype=torch.bool)
        for start, length in zip(self.ends(lengths), lengths, strict=False):
            real[start : start + length] = True
        return ~real

    def call(self, mode: str, device: torch.device) -> AttentionCall:
        """The arguments of the kernel's call."""

        def told(numbers: list[int]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device=device)

        queries, keys = self.queries, self.key_lengths
        cumulative = [told(list(accumulate(lengths, initial=0))) for lengths in (queries, keys)]
        starts = [told(self.ends(lengths)) if self.says_starts else None for lengths in (queries, keys)]
        longest = [max(lengths) if self.says_longest else None for lengths in (queries, keys)]
        return AttentionCall("thd", mode, cumulative[0], cumulative[1], starts[0], starts[1], longest[0], longest[1])


def packed(
    subject: Subject,
    layer: Layer,
    packing: Packing,
    dtype: torch.dtype,
    attend: AttentionKernel | None = None,
    **others: Any,
) -> Comparison:
    """Return the comparison of a packed call, in a neutral mode, with its definition.

    Args:
        subject: The platform.
        layer: The layer.
        packing: The sequences.
        dtype: Element type of the operands.
        attend: The layer's kernel; None = the one that the platform's hooks return.
        others: Fields of :class:`Comparison`.
    """
    mode = next(mode for mode, causal in PACKED.items() if causal == layer.causal)
    call = packing.call(mode, subject.device)
    attend = attend or layer.kernel(subject)
    queries, keys = packing.queries, packing.key_lengths

    def kernel(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        return attend(query, key, value, dataclasses.replace(call, sinks=sinks))

    def definition(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        return reference_attention(
            *(query, key, value),
            lengths=queries,
            key_lengths=keys,
            starts=packing.ends(queries)[:-1],
            key_starts=packing.ends(keys)[:-1],
            scale=SCALE,
            causal=layer.causal,
            window=layer.window,
            sinks=sinks,
        )

    padding = {"queries": packing.padding(queries), "keys": packing.padding(keys), "values": packing.padding(keys)}
    blind = padding["queries"].clone()
    for start, query_count, key_count in zip(packing.ends(queries), queries, keys, strict=False):
        # With causality the first queries stand before the first key.
        unseeing = query_count if key_count == 0 else max(0, query_count - key_count) if layer.causal else 0
        blind[start : start + unseeing] = True
    operands = layer.operands((packing.rows(queries),), (packing.rows(keys),))
    settings = {"meaningless": padding, "empty": blind, "factor": FACTOR[dtype], **others}
    return Comparison(kernel, definition, operands, dtype, **settings)


def padded(
    subject: Subject,
    layer: Layer,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    mode: str,
    mask: Tensor | None = None,
    attend: AttentionKernel | None = None,
    **others: Any,
) -> Comparison:
    """Return the comparison of a padded call, in a neutral mode, with its definition.

    Args:
        subject: The platform.
        layer: The layer.
        shape: Number of rows, and of queries and keys in each row.
        dtype: Element type of the operands.
        mode: A neutral kernel mode.
        mask: bool, broadcastable to ``[B, H, Sq, Sk]``, True = MASKED.
        attend: The layer's kernel; None = the one that the platform's hooks return.
        others: Fields of :class:`Comparison`.
    """
    rows, queries, keys = shape
    attend = attend or layer.kernel(subject)
    seen = in_sight(queries, keys, PADDED[mode], layer.window)
    if mask is not None:
        seen = seen & ~mask

    def kernel(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        told = None if mask is None else mask.to(subject.device)
        return attend(query, key, value, AttentionCall("bshd", mode, mask=told, sinks=sinks))

    def definition(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        return attend_where(query, key, value, seen, SCALE, sinks)

    blind = ~seen.any(-1).expand(rows, layer.heads, queries).transpose(1, 2)
    settings = {"empty": blind.contiguous(), "factor": FACTOR[dtype], **others}
    return Comparison(kernel, definition, layer.operands((rows, queries), (rows, keys)), dtype, **settings)


def in_sight(queries: int, keys: int, causal: bool, window: tuple[int, int] | None) -> Tensor:
    """Return which keys a query may see by position, with the last query at the last key: bool ``[1, 1, Sq, Sk]``."""
    left, right = window or (-1, -1)

    def sees(query: int, key: int) -> bool:
        ahead = key - (query + keys - queries)
        return not ((causal and ahead > 0) or (left >= 0 and -ahead > left) or (right >= 0 and ahead > right))

    return torch.tensor([[[[sees(query, key) for key in range(keys)] for query in range(queries)]]])
