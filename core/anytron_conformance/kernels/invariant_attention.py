"""The rule of company-invariant attention: a query's bits do not depend on what else is in the call."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from anytron.device.platform import Feature
from anytron.kernels.contract import AttentionCall
from anytron_conformance.compare import assert_same_bits
from anytron_conformance.kernels.attention_calls import Layer, Packing
from anytron_conformance.kernels.comparison import in_dtypes
from anytron_conformance.rules import Case, rule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anytron.kernels.contract import AttentionKernel
    from anytron_conformance.subject import Subject

TOKENS = 321
"""Tokens of the sequence in whose company others are."""
LAYERS: Mapping[str, Layer] = MappingProxyType(
    {
        "9 heads, 3 groups, 64": Layer(9, 3, 64, 64),
        "32 heads, 8 groups, 128": Layer(32, 8, 128, 128),
        "16 heads, 192 and 128": Layer(16, 16, 192, 128),
        "4 heads, 2 groups, 64, window of 100": Layer(4, 2, 64, 64, window=(100, 0)),
    }
)
"""Heads of SmolLM2-135M, of Llama-3-8B and Qwen3-8B, and of DeepSeek-V2-Lite."""


@dataclass(frozen=True)
class Sequences:
    """One sequence, and others, for a kernel of attention.

    Attributes:
        attend: The kernel.
        own: Queries, keys and values of the sequence: ``[TOKENS, heads, D]``.
        others: The same of 400 tokens of other sequences.
    """

    attend: AttentionKernel
    own: tuple[Tensor, Tensor, Tensor]
    others: tuple[Tensor, Tensor, Tensor]

    def packed(self, parts: list[tuple[int, int]], gap: int = 0) -> list[Tensor]:
        """Attend in one packed call.

        Args:
            parts: Number of queries and of keys of each sequence: the last of the first keys of :attr:`own`. With
                negative numbers, the tokens are those of :attr:`others`.
            gap: Padding after each sequence.

        Returns:
            The result of each sequence.
        """
        lengths = tuple(abs(queries) for queries, _ in parts), tuple(abs(keys) for _, keys in parts)
        packing = Packing(*lengths, gaps=(gap,) * len(parts), tail=gap)
        buffers = []
        for number in range(3):
            cut = [
                (self.own if keys > 0 else self.others)[number][abs(keys) - count if number == 0 else 0 : abs(keys)]
                for (_, keys), count in zip(parts, lengths[0], strict=True)
            ]
            filled = [functional.pad(one, (0, 0, 0, 0, 0, gap), value=7.0) for one in cut]
            buffers.append(functional.pad(torch.cat(filled), (0, 0, 0, 0, 0, gap), value=7.0))
        query, key, value = buffers
        found = self.attend(query, key, value, packing.call("padding_causal", query.device))
        starts = packing.ends(packing.queries)
        return [found[start : start + count] for start, count in zip(starts, packing.queries, strict=False)]

    def padded(self, mode: str, rows: int, columns: int, place: int) -> Tensor:
        """Attend in one call of padded rows, of which one begins with the sequence, and return its result."""
        query, key, value = (one[:columns].expand(rows, *one[:columns].shape).contiguous() for one in self.others)
        for buffer, mine in zip((query, key, value), self.own, strict=True):
            buffer[place, :TOKENS] = mine
        mask = None
        if mode != "causal":
            places = torch.arange(columns, device=query.device)
            ends = torch.tensor(
                [TOKENS if row == place else columns - row for row in range(rows)], device=places.device
            )
            mask = (places >= ends[:, None])[:, None, None]
            if mode == "arbitrary":
                mask = mask | (places > places[:, None])
        return self.attend(query, key, value, AttentionCall("bshd", mode, mask=mask))[place, :TOKENS]


def _thd(sequences: Sequences) -> None:
    (whole,) = sequences.packed([(TOKENS, TOKENS)])
    company = [(-5, -5), (-400, -400), (-70, -70), (-1, -1)]
    for place in (0, 2, 4):
        parts = [*company[:place], (TOKENS, TOKENS), *company[place:]]
        for gap in (0, 3):
            found = sequences.packed(parts, gap)[place]
            words = f"a sequence of {TOKENS} tokens, packed as number {place} of 5, with {gap} rows of padding"
            assert_same_bits(found, whole, words)
    lengths = (1, 2, 63, 64, 65, 150, 257, 320)
    for length, found in zip(lengths, sequences.packed([(one, one) for one in lengths]), strict=True):
        assert_same_bits(found, whole[:length], f"the first {length} of {TOKENS} tokens, without those after them")
    for queries in (1, 17):
        together = [(min(queries, one), one) for one in (*lengths, TOKENS)]
        for apart in (False, True):
            calls = [[one] for one in together[-3:]] if apart else [together]
            for call in calls:
                for (count, keys), found in zip(call, sequences.packed(call), strict=True):
                    words = f"the last {count} of {keys} tokens, as the only queries{'' if apart else ', packed'}"
                    assert_same_bits(found, whole[keys - count : keys], words)


def _bshd(sequences: Sequences) -> None:
    (whole,) = sequences.packed([(TOKENS, TOKENS)])
    for mode, rows, columns, place in (
        ("causal", 1, TOKENS, 0),
        ("causal", 3, 400, 1),
        ("padding_causal", 2, 400, 0),
        ("arbitrary", 2, 330, 1),
    ):
        found = sequences.padded(mode, rows, columns, place)
        assert_same_bits(found, whole, f"{TOKENS} tokens, in {rows} padded rows of {columns}, mode {mode}")
    query, key, value = sequences.own
    for count in (64, 150, TOKENS):
        operands = (query[None, count - 1 : count], key[None, :count], value[None, :count])
        found = sequences.attend(*operands, AttentionCall("bshd", "causal"))[0]
        words = f"the last of {count} tokens, as the only query of a padded row"
        assert_same_bits(found, whole[count - 1 : count], words)


@rule(
    "invariant-attention",
    "kernels",
    "The result of a query in company-invariant attention depends on the query and the keys that it sees only.",
    needs=(Feature.COMPANY_INVARIANCE,),
    cases=in_dtypes(
        (f"{words}, {name}", (check, layer), (*layer.needs, *needs))
        for name, layer in LAYERS.items()
        for words, check, needs in (
            ("packed", _thd, (Feature.THD,)),
            ("padded", _bshd, (Feature.THD, Feature.BSHD)),
        )
    ),
)
def attention(subject: Subject, case: Case) -> None:
    """Attend to a sequence of 321 tokens alone in a buffer, and compare bytes with other calls that contain it.

    It is packed beside other sequences, with and without padding; cut to a prefix; attended with its last query or
    its last 17, and all keys, as in decoding with a cache; and as one of several padded rows, in every causal mode. A
    kernel breaks the rule if it splits keys by the number of queries, keys or sequences, if it counts blocks of keys
    from the last one or from the buffer's beginning, or if decoding has a separate formula. Layers with sinks have no
    company-invariant default, nor have ``causal_conv1d``, ``gated_delta_rule`` and ``state_space_scan``: no rule checks
    them.
    """
    dtype, (check, layer) = case.values
    own, others = (
        tuple((one / factor).to(subject.device, dtype) for one in layer.operands((count,), (count,)).values())
        for count, factor in ((TOKENS, 2.0), (400, 1.0))
    )
    check(Sequences(layer.kernel(subject, invariant=True), own, others))


RULES = (attention,)
