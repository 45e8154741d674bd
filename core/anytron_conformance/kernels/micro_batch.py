"""Rules of attention kernels called as the engine calls them: with the platform's mask, in a micro-batch's scope."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anytron.device.platform import Feature
from anytron.kernels.oracles.attention import reference_attention
from anytron.proof.checks import Inapplicable
from anytron.sequences import scopes
from anytron_conformance.kernels.attention_calls import FACTOR, SCALE, Layer
from anytron_conformance.kernels.comparison import Comparison, in_dtypes
from anytron_conformance.micro_batches import FEATURE, FORMATS, Scene, micro_batch
from anytron_conformance.rules import Broken, Case, rule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from anytron.kernels.contract import AttentionCall, AttentionKernel
    from anytron.sequences.layout import Format
    from anytron_conformance.subject import Subject

LAYERS = {
    "plain": Layer(),
    "4 heads, 2 groups": Layer(4, 2),
    "heads of 24 and 16": Layer(size=24),
    "window (2, 0)": Layer(window=(2, 0)),
    "sinks": Layer(4, 2, sinks=True),
}
LENGTHS = ((1,), (2, 1), (5, 1, 9, 4), (70, 33))


def _cases(every: Iterable[tuple[int, ...]]) -> Iterator[Case]:
    return in_dtypes(
        (
            f"{form}, {name}, lengths {' '.join(map(str, lengths))}",
            (form, layer, lengths),
            (FEATURE[form], *layer.needs),
        )
        for lengths in every
        for name, layer in LAYERS.items()
        for form in FORMATS
    )


def _scene(
    subject: Subject, layer: Layer, lengths: tuple[int, ...], sequence_format: Format, context: int = 1
) -> Scene:
    if not subject.platform.portable_modules:
        raise Inapplicable("the platform's modules are a vendor's, which call their own attention")
    return Scene(sequence_format, lengths, layer.traits, context=context)


@rule(
    "attention-own-mask",
    "kernels",
    "The kernel of each layer can read the mask of build_attn_mask, within the scope of the micro-batch.",
    cases=_cases(LENGTHS),
)
def own_mask(subject: Subject, case: Case) -> None:
    """Prepare a micro-batch through the hooks, call the kernel with the mask and the mode of the platform, and compare.

    ``layout_constraints``, ``preprocess_sequences`` and ``build_attn_mask`` are called as by the engine. Padding
    holds NaN in thd and 7 in bshd. Every layer of the model gets this mode, also a layer whose kernel the platform
    leaves to the next plugin: so a platform with its own mode must also supply all kernels that read it.
    """
    dtype, (sequence_format, layer, lengths) = case.values
    batch = micro_batch(subject, _scene(subject, layer, lengths, sequence_format))
    layout, attend = batch.layout, layer.kernel(subject)
    packed = sequence_format == "thd"

    def kernel(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        rows = (layout.pack(flat, torch.nan if packed else 7.0) for flat in (query, key, value))
        queries, keys, values = (one[0] if packed else one for one in rows)
        with scopes.enter(batch.scope):
            output = attend(queries, keys, values, batch.call(sinks))
        output = output[None] if packed else output
        if packed and bool((output[~layout.valid] != 0).any()):
            raise Broken("The output is not 0 in padding.")
        return layout.unpack(output)

    _compare(layer, lengths, kernel, dtype).hold(subject)


def _compare(
    layer: Layer, lengths: Sequence[int], kernel: Callable[..., Tensor | tuple[Tensor, ...]], dtype: torch.dtype
) -> Comparison:
    def definition(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        return reference_attention(query, key, value, lengths=lengths, scale=SCALE, window=layer.window, sinks=sinks)

    rows = (sum(lengths),)
    return Comparison(kernel, definition, layer.operands(rows, rows), dtype, factor=FACTOR[dtype])


@rule(
    "attention-context-parallel",
    "kernels",
    "The kernel is right for a rank's chunks of queries with prefixes of all keys, as context parallelism calls it.",
    needs=(Feature.CONTEXT_PARALLEL,),
    cases=_cases(LENGTHS[:3]),
)
def context_parallel(subject: Subject, case: Case) -> None:
    """Simulate both ranks of a context-parallel group in one process, and compare their combined results.

    Rank r holds the chunks r and 3 - r of each padded sequence. Each chunk is one call. Its keys are a prefix of the
    sequence and outnumber its queries. In thd the buffer also holds the rows of the other chunk, which give 0, and the
    results of the calls are added.
    """
    dtype, (sequence_format, layer, lengths) = case.values
    attend = layer.kernel(subject)
    scene = _scene(subject, layer, lengths, sequence_format, context=2)
    ranks = [micro_batch(subject, scene, rank=rank) for rank in (0, 1)]
    first = ranks[0].layout
    # All keys in order: a buffer of whole padded sequences.
    starts = (
        first.cu_seqlens_padded.tolist()
        if sequence_format == "thd"
        else [row * 2 * first.shape[1] for row in range(len(lengths) + 1)]
    )
    slots = torch.cat([torch.arange(length) + start for start, length in zip(starts, lengths, strict=False)])
    held = [batch.layout.token_index.flatten() < sum(lengths) for batch in ranks]
    order = torch.cat([batch.layout.token_index.flatten()[one] for batch, one in zip(ranks, held, strict=True)])

    def kernel(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        whole = [
            one.new_full((starts[-1], *one.shape[1:]), 7.0).index_copy(0, slots.to(one.device), one)
            for one in (key, value)
        ]
        parts = []
        for rank, batch in enumerate(ranks):
            with scopes.enter(batch.scope):
                queries = batch.layout.pack(query, 7.0)
                call = batch.call(sinks)
                if sequence_format == "thd":
                    calls = _chunk_calls(call, lengths, starts, rank, query.device)
                    first_half, second_half = (attend(queries[0], whole[0], whole[1], one) for one in calls)
                    output = first_half + second_half
                else:
                    rows = [one.unflatten(0, (len(lengths), -1)) for one in whole]
                    output = _attend_to_prefixes(attend, queries, rows, call, rank).flatten(0, 1)
            parts.append(output[held[rank]])
        return torch.cat(parts)[order.argsort()]

    _compare(layer, lengths, kernel, dtype).hold(subject)


def _attend_to_prefixes(
    attend: AttentionKernel, queries: Tensor, others: Sequence[Tensor], call: AttentionCall, rank: int
) -> Tensor:
    chunk, (key, value) = queries.shape[1] // 2, others
    outputs = [
        attend(part, key[:, : (number + 1) * chunk], value[:, : (number + 1) * chunk], call)
        for part, number in zip(queries.split(chunk, dim=1), (rank, 3 - rank), strict=True)
    ]
    return torch.cat(outputs, dim=1)


def _chunk_calls(
    call: AttentionCall, lengths: Sequence[int], starts: Sequence[int], rank: int, device: torch.device
) -> list[AttentionCall]:
    """The calls of a rank's two chunks, from the lengths of whole sequences and where those start."""

    def told(numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    calls = []
    for half, number in enumerate((rank, 3 - rank)):
        ends, key_ends, begins = [0], [0], []
        for length, start, end in zip(lengths, starts, starts[1:], strict=False):
            chunk = (end - start) // 4
            queries = min(max(length - number * chunk, 0), chunk)
            ends.append(ends[-1] + queries)
            key_ends.append(key_ends[-1] + (min(length, (number + 1) * chunk) if queries else 0))
            begins.append(start // 2 + half * chunk)
        begins.append(starts[-1] // 2)
        calls.append(
            replace(
                call,
                cu_seqlens_q=told(ends),
                cu_seqlens_kv=told(key_ends),
                cu_seqlens_q_padded=told(begins),
                cu_seqlens_kv_padded=told(starts),
                max_seqlen_q=max(later - one for one, later in pairwise(ends)),
                max_seqlen_kv=max(later - one for one, later in pairwise(key_ends)),
            )
        )
    return calls


RULES = (own_mask, context_parallel)
