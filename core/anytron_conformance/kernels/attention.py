"""Rules of attention kernels in the neutral modes, which every kernel must know."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron.device.platform import Feature
from anytron_conformance.kernels.attention_calls import Layer, Packing, packed, padded
from anytron_conformance.kernels.comparison import in_dtypes, sliced, split_off
from anytron_conformance.rules import Case, rule

if TYPE_CHECKING:
    from anytron_conformance.subject import Subject

THD, BSHD = Feature.THD, Feature.BSHD


UNMASKED = {True: "causal", False: "no_mask"}
"""Modes of bshd without a mask, by whether they are causal."""


def _either(causal: bool) -> str:
    return "causal" if causal else "not causal"


@rule(
    "attention-packed",
    "kernels",
    "Attention over packed sequences is softmax(scale * q k) v within each sequence, in values and gradients.",
    cases=in_dtypes(
        (f"thd, {_either(causal)}, {name}", (Layer(causal=causal), packing), (THD,))
        for name, packing in {
            "one token": Packing((1,)),
            "lengths 2 1 3": Packing((2, 1, 3)),
            "lengths 2 1 3, no padded lengths given": Packing((2, 1, 3), says_starts=False, says_longest=False),
            "lengths 3 1, padded to 4": Packing((3, 1), gaps=(1, 3)),
            "lengths 3 0 2, padded to 3 2 4, tail of 5": Packing((3, 0, 2), gaps=(0, 2, 2), tail=5),
            "lengths 70 1 133, padded to 72 8 136": Packing((70, 1, 133), gaps=(2, 7, 3)),
        }.items()
        for causal in (True, False)
    ),
)
def packed_attention(subject: Subject, case: Case) -> None:
    """Call the kernel with sequences in one buffer, and compare with float64.

    Real lengths (``cu_seqlens_q``) and padded ones (``cu_seqlens_q_padded``) differ: sequences start at the padded
    offsets, and the rows between have no effect, give 0 and get no gradient. A kernel that reads at the real
    lengths' offsets, that lets a sequence see its neighbour, or that scales by ``1 / sqrt(size)`` instead of
    ``spec.scale`` breaks the rule.
    """
    dtype, (layer, packing) = case.values
    packed(subject, layer, packing, dtype).hold(subject)


@rule(
    "attention-padded",
    "kernels",
    "Attention over rows in bshd is softmax(scale * q k) v, in values and gradients.",
    cases=in_dtypes(
        (f"bshd, {_either(causal)}, {rows} x {length}", (Layer(causal=causal), (rows, length, length)), (BSHD,))
        for rows, length in ((1, 1), (1, 3), (2, 5), (2, 130))
        for causal in (True, False)
    ),
)
def padded_attention(subject: Subject, case: Case) -> None:
    """Call the kernel with rows ``[B, S, H, D]`` in the modes ``causal`` and ``no_mask``, and compare with float64."""
    dtype, (layer, shape) = case.values
    padded(subject, layer, shape, dtype, UNMASKED[layer.causal]).hold(subject)


def _masks() -> dict[str, torch.Tensor]:
    """Masks for 2 rows, 4 heads, 5 queries and 5 keys; one row of each sees nothing."""
    drawn = torch.rand(2, 4, 5, 5, generator=torch.Generator().manual_seed(3)) > 0.6
    found = {"[B, 1, Sq, Sk]": drawn[:, :1], "[1, 1, Sq, Sk]": drawn[:1, :1], "[B, H, Sq, Sk]": drawn}
    for mask in found.values():
        mask[0, 0, 2] = True
    keys = torch.tensor([5, 3])[:, None] <= torch.arange(5)
    return {**found, "[B, 1, 1, Sk]": keys[:, None, None]}


@rule(
    "attention-masks",
    "kernels",
    "A mask hides pairs where it is True, besides causality; a query that sees no key gives 0 and no gradient.",
    cases=in_dtypes(
        (f"bshd, mode {mode}, mask {name}", (Layer(4, 4, causal=mode != "padding"), mode, mask), (BSHD,))
        for name, mask in _masks().items()
        for mode in ("arbitrary", "padding", "padding_causal")
    ),
)
def masked_attention(subject: Subject, case: Case) -> None:
    """Call the kernel with mask tensors of every shape that broadcasts to ``[B, H, Sq, Sk]``, and compare with float64.

    True means MASKED. With ``padding_causal`` causality hides pairs in addition; with ``arbitrary`` only the mask
    does, also in a layer of a causal model. A kernel that reads True as "keep", that ignores the mask where the mode is
    causal, or whose softmax of a row without keys is NaN breaks the rule.
    """
    dtype, (layer, mode, mask) = case.values
    padded(subject, layer, (2, 5, 5), dtype, mode, mask).hold(subject)


@rule(
    "attention-groups",
    "kernels",
    "With H query heads and G key heads, query head h reads key head h // (H / G).",
    cases=in_dtypes(
        (f"{sequence_format}, {heads} heads, {groups} groups", (sequence_format, Layer(heads, groups)), needs)
        for heads, groups in ((2, 1), (4, 2), (6, 2), (3, 3))
        for sequence_format, needs in (("thd", (THD,)), ("bshd", (BSHD,)))
    ),
)
def grouped_attention(subject: Subject, case: Case) -> None:
    """Call the kernel with fewer heads of keys than of queries.

    A kernel breaks the rule if query head ``h`` reads key head ``h % G``, or if a key head gets the gradient of only
    one of its query heads.
    """
    dtype, (sequence_format, layer) = case.values
    if sequence_format == "thd":
        packed(subject, layer, Packing((3, 2)), dtype).hold(subject)
    else:
        padded(subject, layer, (1, 3, 3), dtype, "causal").hold(subject)


@rule(
    "attention-head-sizes",
    "kernels",
    "Heads may have any size; value heads may be smaller than query and key heads, or padded to their size.",
    cases=in_dtypes(
        [
            *(
                (f"{sequence_format}, {size} and {v_size}", (sequence_format, layer), (*layer.needs, *needs))
                for size, v_size in ((24, 16), (40, 40), (192, 128))
                for layer in (Layer(size=size, v_size=v_size),)
                for sequence_format, needs in (("thd", (THD,)), ("bshd", (BSHD,)))
            ),
            *(
                (f"thd, {size} and {v_size}, values padded to {size}", ("thd", layer), (*layer.needs, THD))
                for size, v_size in ((24, 16), (192, 128))
                for layer in (Layer(size=size, v_size=v_size, pads_values=True),)
            ),
        ]
    ),
)
def sized_attention(subject: Subject, case: Case) -> None:
    """Call the kernel as multi-latent attention does, and with head sizes that are not powers of two.

    Packed values of multi-latent attention are padded with zeros from ``spec.v_dim`` to the size of queries, and the
    result must be as wide: a kernel that allocates only ``spec.v_dim`` breaks the rule. For a spec that its kernel
    cannot compute, the hook must answer None, which leaves the layer to the next plugin.
    """
    dtype, (sequence_format, layer) = case.values
    if sequence_format == "thd":
        packed(subject, layer, Packing((3, 2), gaps=(1, 0)), dtype).hold(subject)
    else:
        padded(subject, layer, (2, 4, 4), dtype, UNMASKED[layer.causal]).hold(subject)


@rule(
    "attention-windows",
    "kernels",
    "A query sees no key outside of its layer's window, whatever the mode and the mask say.",
    needs=(Feature.SLIDING_WINDOW,),
    cases=in_dtypes(
        (f"{sequence_format}, {_either(causal)}, window {window}", (sequence_format, layer), needs)
        for causal, window in ((True, (1, 0)), (True, (2, -1)), (True, (0, 0)), (False, (1, 2)), (False, (-1, 1)))
        for layer in (Layer(causal=causal, window=window),)
        for sequence_format, needs in (("thd", (THD,)), ("bshd", (BSHD,)))
    ),
)
def windowed_attention(subject: Subject, case: Case) -> None:
    """Call the kernel of a layer whose ``spec.traits.window`` hides keys; the call itself does not contain the window.

    A query sees ``(left, right)`` neighbours, both ends included; -1 = all. Cases with fewer queries than keys, and in
    bshd with a mask, are included. A kernel that ignores windows breaks the rule: its hook must answer None to a spec
    with a window.
    """
    dtype, (sequence_format, layer) = case.values
    if sequence_format == "thd":
        packed(subject, layer, Packing((5, 2), gaps=(1, 2)), dtype).hold(subject)
        packed(subject, layer, Packing((3, 2), keys=(7, 2)), dtype).hold(subject)
    else:
        mask = torch.zeros(1, 1, 6, 6, dtype=torch.bool)
        mask[..., 3] = True
        padded(subject, layer, (1, 6, 6), dtype, UNMASKED[layer.causal]).hold(subject)
        padded(subject, layer, (1, 6, 6), dtype, "padding_causal" if layer.causal else "arbitrary", mask).hold(subject)


@rule(
    "attention-sinks",
    "kernels",
    "A learnt logit per head joins the softmax's denominator and has a gradient.",
    needs=(Feature.ATTENTION_SINKS,),
    cases=in_dtypes(
        (f"{sequence_format}, {_either(layer.causal)}", (sequence_format, layer), needs)
        for layer in (Layer(4, 2, sinks=True), Layer(4, 2, sinks=True, causal=False))
        for sequence_format, needs in (("thd", (THD,)), ("bshd", (BSHD,)))
    ),
)
def attention_with_sinks(subject: Subject, case: Case) -> None:
    """Call the kernel of a layer with attention sinks, as in gpt-oss.

    A kernel that ignores ``call.sinks``, or gives them no gradient, breaks the rule: its hook must answer None to a
    spec with sinks.
    """
    dtype, (sequence_format, layer) = case.values
    if sequence_format == "thd":
        packed(subject, layer, Packing((3, 1, 4), gaps=(1, 3, 0)), dtype).hold(subject)
    else:
        padded(subject, layer, (2, 4, 4), dtype, UNMASKED[layer.causal]).hold(subject)


@rule(
    "attention-fewer-queries",
    "kernels",
    "Where a sequence has fewer or more queries than keys, its last query stands at its last key.",
    cases=in_dtypes(
        [
            *(
                (f"thd, {_either(causal)}, {name}", (Layer(causal=causal), packing), (THD,))
                for name, packing in {
                    "1 query, 3 keys": Packing((1,), keys=(3,)),
                    "2 3 queries, 5 3 keys": Packing((2, 3), keys=(5, 3)),
                    "2 0 3 queries, 5 2 0 keys, padded": Packing((2, 0, 3), keys=(5, 2, 0), gaps=(2, 1, 0), tail=1),
                    "4 2 queries, 2 2 keys": Packing((4, 2), keys=(2, 2)),
                }.items()
                for causal in (True, False)
            ),
            *(
                (f"bshd, causal, {queries} queries, {keys} keys", (Layer(), (2, queries, keys)), (BSHD,))
                for queries, keys in ((1, 3), (3, 5), (4, 2))
            ),
        ]
    ),
)
def aligned_attention(subject: Subject, case: Case) -> None:
    """Call the kernel with fewer queries than keys, as context parallelism does, and with more queries than keys.

    Causality is aligned bottom right (``is_causal`` of torch's ``scaled_dot_product_attention`` is top left). Queries
    that stand before the first key see nothing: they give 0 and no gradient, never NaN.
    """
    dtype, (layer, lengths) = case.values
    if isinstance(lengths, Packing):
        packed(subject, layer, lengths, dtype).hold(subject)
    else:
        padded(subject, layer, lengths, dtype, "causal").hold(subject)


@rule(
    "attention-poisoned-padding",
    "kernels",
    "Rows of padding in thd may hold NaN: they have no effect on values or gradients.",
    needs=(THD,),
    cases=in_dtypes(
        (f"{_either(layer.causal)}{', sinks' * layer.sinks}, {name}", (layer, packing), layer.needs)
        for layer in (Layer(4, 2), Layer(4, 2, causal=False), Layer(4, 2, sinks=True))
        for name, packing in {
            "tail": Packing((2,), tail=2),
            "length 3, padded to 4": Packing((3,), gaps=(1,)),
            "lengths 3 4 2, padded to 5 4 8, tail of 3": Packing((3, 4, 2), gaps=(2, 0, 6), tail=3),
            "lengths 5 5, padded to 6 6": Packing((5, 5), gaps=(1, 1)),
        }.items()
    ),
)
def poisoned_attention(subject: Subject, case: Case) -> None:
    """Fill the padding of queries, keys and values with NaN, and compare with float64.

    Engines do not write padding, so it holds arbitrary memory. Multiplying it with 0 is not enough, because 0 times NaN
    is NaN. The gradient that comes in for rows of padding is finite, and the gradient that goes out must be 0.
    """
    dtype, (layer, packing) = case.values
    packed(subject, layer, packing, dtype, garbage=float("nan")).hold(subject)


@rule(
    "attention-strides",
    "kernels",
    "Operands and the gradient that comes in may lie in memory with any strides.",
    cases=in_dtypes(
        (f"{sequence_format}, {name}", (sequence_format, lay), needs)
        for name, lay in (("parts of one tensor", split_off), ("every other number", sliced))
        for sequence_format, needs in (("thd", (THD,)), ("bshd", (BSHD,)))
    ),
)
def strided_attention(subject: Subject, case: Case) -> None:
    """Pass operands, and an incoming gradient, that are views of larger tensors, like those of a fused projection.

    A kernel that needs contiguous memory calls ``contiguous()``, in the backward pass too.
    """
    dtype, (sequence_format, lay) = case.values
    layer = Layer(4, 2)
    if sequence_format == "thd":
        packed(subject, layer, Packing((3, 2), gaps=(1, 0)), dtype, lay=lay).hold(subject)
        packed(subject, layer, Packing((4, 4)), dtype, lay=lay).hold(subject)
    else:
        padded(subject, layer, (2, 4, 4), dtype, "causal", lay=lay).hold(subject)


RULES = (
    packed_attention,
    padded_attention,
    masked_attention,
    grouped_attention,
    sized_attention,
    windowed_attention,
    attention_with_sinks,
    aligned_attention,
    poisoned_attention,
    strided_attention,
)
