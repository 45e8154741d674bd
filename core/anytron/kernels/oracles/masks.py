"""Find which token attends to which: read a mask as its kernel does, or observe which outputs change.

A mask is right if its kernel lets through exactly the pairs of tokens of the definition. Where the kernel can be
called, :func:`influence` finds the pairs from outputs: it changes one key and its value at a time, and a query whose
output changes attends to that key. It need not know the kernel mode or read the mask.

A reader finds the pairs from the mask alone, without calling the kernel. Readers serve a vendor's own modules
(``AttnMask.reader``) and tests of masks. Each reader here follows one kernel's documentation and is independent of the
code that built the mask. It takes the layouts of *all* context-parallel shards, joins the sequences as that kernel's
ring does, and returns pairs of flat token indices. A real token that would attend to padding appears in a pair with
:data:`PADDING`, so that such a mask differs from :func:`defined_pairs`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anytron.sequences.masks import AttnMask, MaskKind, Polarity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.base.traits import ModelTraits
    from anytron.sequences.layout import SequenceLayout
    from anytron.sequences.masks import Pair


PADDING = -1
"""Stands for every padding slot in a pair."""

IN_PADDING = 7.0
"""Value of padding slots of queries, keys and values: finite, and a real token that sees it gets a wrong output."""

PUSH = 1000.0
"""Added to the value of one token: outputs that see this token change by far more than rounding changes others."""

MOVED = {torch.float32: 1e-3}
"""Largest difference of an output that counts as unchanged; for other element types :data:`MOVED_ELSEWHERE`."""

MOVED_ELSEWHERE = 0.01

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function that computes attention of queries, keys and values, each ``[R, C, H, D]``: R rows of C tokens, as they lie
in a layout. It returns ``[R, C, H, Dv]``."""


def defined_pairs(lengths: Sequence[int], traits: ModelTraits) -> set[Pair]:
    """Return the pairs (query, key) that attend by definition.

    Both tokens belong to one sequence, the key is in the query's window, and in a causal model it is not later than the
    query.

    Args:
        lengths: Real lengths of the sequences.
        traits: Traits of the model; only ``causal`` and ``window`` are used.

    Returns:
        Pairs of flat token indices.
    """
    pairs: set[Pair] = set()
    start = 0
    for length in lengths:
        for query in range(length):
            for key in range(length):
                if not (traits.causal and key > query) and _in_window(query, key, traits.window):
                    pairs.add((start + query, start + key))
        start += length
    return pairs


def wrong_companion(mask: AttnMask, layout: SequenceLayout, traits: ModelTraits) -> str:
    """Say how ``padding_mask`` or ``linear_attn_mask`` of a mask differs from the layout; empty if neither does.

    Args:
        mask: The answer of ``build_attn_mask`` for the layout.
        layout: Layout of this rank.
        traits: Traits of the model; only ``mixture_of_experts`` is used.
    """
    found = mask.padding_mask
    if found is None and traits.mixture_of_experts and not bool(layout.valid.all()):
        return "A mixture of experts gets no padding_mask, though there is padding."
    if found is not None and not torch.equal(found, ~layout.valid):
        return "padding_mask does not match the layout: it must be True at padding and False at real tokens."
    if mask.linear_attn_mask is not None:
        columns = torch.arange(mask.linear_attn_mask.shape[1], device=mask.linear_attn_mask.device)
        real = columns[None] < layout.lengths.to(columns.device)[:, None]
        if not torch.equal(mask.linear_attn_mask, real):
            return "linear_attn_mask does not match the layout: it must be True at real tokens and False at padding."
    return ""


def read_transformer_engine(mask: AttnMask, layouts: Sequence[SequenceLayout], traits: ModelTraits) -> set[Pair]:
    """Read ``attn_mask_type`` as ``transformer_engine.pytorch.DotProductAttention`` documents it.

    The modes are ``no_mask``, ``causal`` (aligned top left, ignores padding), ``padding`` and ``padding_causal`` (real
    keys by ``cu_seqlens`` or by the 2-D map), and ``arbitrary`` (True = masked). The window is a setting of the module.
    If the model itself packs by the 2-D map, attention runs on the packed sequences.

    Args:
        mask: The answer of ``build_attn_mask``.
        layouts: Layouts of all context-parallel shards, in rank order.
        traits: Traits of the model; only ``window`` is used.

    Raises:
        ValueError: Transformer Engine refuses this combination.
    """
    layout, mode = layouts[0], mask.kernel_mode
    packed = layout.format == "thd"
    causal, padded = mode in ("causal", "padding_causal"), mode in ("padding", "padding_causal")
    if mode not in ("no_mask", "causal", "padding", "padding_causal", "arbitrary"):
        raise ValueError(f"Transformer Engine has no attn_mask_type {mode!r}")
    if packed and not padded:
        raise ValueError(f"packed sequences need attn_mask_type 'padding' or 'padding_causal', not {mode!r}")
    if len(layouts) > 1 and (mode == "arbitrary" or (padded and not packed)):
        raise ValueError(f"with context parallelism, attn_mask_type {mode!r} cannot be used in {layout.format}")

    def in_sight(query: int, key: int) -> bool:
        return not (causal and key > query) and _in_window(query, key, traits.window)

    if packed and mask.kind is MaskKind.PADDING_2D:
        return token_pairs(_packed_by_map(mask, layout), lambda _, query, key: in_sight(query, key))
    rows = ring_rows(layouts)
    if mode == "arbitrary":
        forbidden = _required(mask, Polarity.MASKED)
        return token_pairs(rows, lambda row, query, key: not bool(forbidden[row, 0, query, key]))
    if not padded:
        return token_pairs(rows, lambda _, query, key: in_sight(query, key))
    if packed:
        lengths = layout.cu_seqlens.diff().tolist()
        real = [[position < length for position in range(len(row))] for row, length in zip(rows, lengths, strict=True)]
    else:
        real = _required(mask, Polarity.KEEP).tolist()
    return token_pairs(rows, lambda row, query, key: real[row][query] and real[row][key] and in_sight(query, key))


def read_flash_attention(mask: AttnMask, layouts: Sequence[SequenceLayout], traits: ModelTraits) -> set[Pair]:
    """Read a mask as ``flash_attn_varlen_func`` (thd) and ``flash_attn_func`` (bshd) do; causal is bottom right.

    Neither function takes a mask or knows padding: ``cu_seqlens_padded`` defines the sequences.

    Args:
        mask: A mask of kind ``none``; its mode says whether ``causal`` is passed.
        layouts: The layout of the only shard.
        traits: Traits of the model; only ``window`` is used.

    Raises:
        ValueError: There is a mask tensor, or several shards.
    """
    if mask.tensor is not None or len(layouts) > 1:
        raise ValueError("flash-attn takes neither masks nor context-parallel shards")
    causal = "causal" in mask.kernel_mode
    return token_pairs(
        ring_rows(layouts),
        lambda _, query, key: not (causal and key > query) and _in_window(query, key, traits.window),
    )


def token_pairs(rows: Sequence[Sequence[int]], allowed: Callable[[int, int, int], bool]) -> set[Pair]:
    """Collect the pairs (query token, key token) that attend, as a mask's reader returns them.

    Args:
        rows: For each row of attention, the flat token at each position; -1 = padding (:func:`ring_rows`).
        allowed: Function that tells, by the row's number and the positions of query and key, whether they attend.

    Returns:
        The allowed pairs whose query is a real token; a key may be -1.
    """
    return {
        (query_token, key_token)
        for number, row in enumerate(rows)
        for query, query_token in enumerate(row)
        if query_token != PADDING
        for key, key_token in enumerate(row)
        if allowed(number, query, key)
    }


def ring_rows(layouts: Sequence[SequenceLayout]) -> list[list[int]]:
    """Return the flat token at each position of each padded sequence, as ring attention sees it; -1 = padding.

    ``layouts`` are those of all context-parallel ranks, in order. The ring knows the number of rows, or
    ``cu_seqlens_padded``, and that rank r holds the chunks r and 2 * ranks - 1 - r of each sequence. It does not know
    the layouts' position ids.
    """
    ranks = len(layouts)
    first = layouts[0]
    if first.format == "thd":
        ends = (first.cu_seqlens_padded // ranks).tolist()
    else:
        ends = [row * first.shape[1] for row in range(first.shape[0] + 1)]
    rows: list[list[int]] = []
    for begin, end in itertools.pairwise(ends):
        local = [_tokens(layout)[begin:end] for layout in layouts]
        half = (end - begin) // 2
        if ranks == 1:
            rows.append(local[0])
        else:
            early = [token for part in local for token in part[:half]]
            late = [token for part in reversed(local) for token in part[half:]]
            rows.append(early + late)
    return rows


def _packed_by_map(mask: AttnMask, layout: SequenceLayout) -> list[list[int]]:
    """What a model that packs inside makes of its rows ``[B, S]`` and the 2-D map."""
    taken = layout.taken
    if taken.format != "bshd":
        raise ValueError("a model that packs by the map takes rows: plan the layout with input_layout='rows'")
    keep = _required(mask, Polarity.KEEP)
    shown = torch.tensor(_tokens(taken)).view(taken.shape)
    return [row[kept].tolist() for row, kept in zip(shown, keep.cpu(), strict=True)]


def _tokens(layout: SequenceLayout) -> list[int]:
    tokens: list[int] = layout.token_index.tolist()
    return [PADDING if token == layout.num_tokens else token for token in tokens]


def _required(mask: AttnMask, polarity: Polarity) -> torch.Tensor:
    tensor = mask.read_as(polarity)
    if tensor is None:
        raise ValueError(f"the kernel mode {mask.kernel_mode!r} needs a mask tensor, but the mask has no tensor")
    return tensor


def _in_window(query: int, key: int, window: tuple[int, int] | None) -> bool:
    left, right = window or (-1, -1)
    return (left < 0 or key >= query - left) and (right < 0 or key <= query + right)


def influence(attend: Attend, operands: Sequence[Tensor], layout: SequenceLayout, device: torch.device) -> set[Pair]:
    """Find the pairs (query token, key token) in which a change of the key changes the query's output.

    Args:
        attend: Function from queries, keys and values in this layout to the attention's output; it must run in the
            scope of the micro-batch.
        operands: Queries, keys and values of all tokens, floating point ``[T, H, D]``, on any device.
        layout: Layout of this rank, on ``device``.
        device: Where ``attend`` computes.

    Returns:
        Pairs of flat token indices; a key may be :data:`~anytron.kernels.oracles.masks.PADDING`. An output that becomes
        NaN counts as changed.
    """
    query, key, value = (layout.pack(operand.to(device), IN_PADDING) for operand in operands)
    limit = MOVED.get(value.dtype, MOVED_ELSEWHERE)
    shown, valid = layout.token_index.view(layout.shape), layout.valid.cpu()
    tokens = shown.cpu()
    pairs: set[Pair] = set()
    with torch.no_grad():
        before = attend(query, key, value).cpu().float()  # compared on the host: only attention is the device's
        for token in range(layout.num_tokens + 1):  # the last stands for all padding
            chosen = (shown == token)[..., None, None]
            after = attend(query, key + chosen.to(key.dtype), value + (PUSH * chosen).to(value.dtype)).cpu().float()
            moved = ~((after - before).abs().amax((-1, -2)) <= limit) & valid
            name = PADDING if token == layout.num_tokens else token
            pairs |= {(seeing, name) for seeing in tokens[moved].tolist()}
    return pairs
