"""The rule about kernels that have nothing to compute."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anytron.device.platform import Feature
from anytron_conformance.kernels.attention_calls import Layer, Packing, packed, padded
from anytron_conformance.kernels.comparison import in_dtypes
from anytron_conformance.kernels.fused import (
    grouped_mm_of,
    layer_norm_of,
    linear_of,
    rms_norm_of,
    rope_of,
    swiglu_of,
)
from anytron_conformance.kernels.linear_attention import convolution_of, delta_rule_of, scan_of
from anytron_conformance.kernels.log_probs import Problem
from anytron_conformance.rules import Case, rule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from anytron_conformance.kernels.comparison import Comparison
    from anytron_conformance.subject import Subject


@dataclass(frozen=True)
class Nothing:
    """A call of a kernel that has nothing to compute.

    Attributes:
        call: Function that takes the subject and a dtype, and returns the comparison of the subject's kernel with its
            definition, on operands of this dtype.
        shape: Shape of each result, whose entries are all 0.
        results: Number of results.
    """

    call: Callable[[Subject, torch.dtype], Comparison]
    shape: tuple[int, ...]
    results: int = 1

    def compared(self, subject: Subject, dtype: torch.dtype) -> Comparison:
        """Return the comparison of the results, and of each operand's gradient, with zeros."""

        def definition(*operands: Tensor) -> tuple[Tensor, ...]:
            none = torch.stack([one.flatten()[:0].sum() for one in operands]).sum()
            return tuple(torch.zeros(self.shape, dtype=torch.float64) + none for _ in range(self.results))

        return replace(self.call(subject, dtype), definition=definition)


_PACKINGS: Mapping[str, Packing] = MappingProxyType(
    {
        "no row in the buffer": Packing((0,)),
        "padding alone": Packing((0, 0), gaps=(2, 0), tail=3),
        "keys without queries": Packing((0, 0), keys=(3, 2), gaps=(1, 4)),
        "queries without keys": Packing((3, 2), keys=(0, 0), gaps=(1, 0)),
    }
)
_LAYERS: Mapping[str, Layer] = MappingProxyType(
    {"": Layer(4, 2), ", not causal": Layer(4, 4, causal=False), ", sinks": Layer(4, 2, sinks=True)}
)
_Named = tuple[str, Nothing, tuple[Feature, ...]]


def _packed_calls() -> Iterator[_Named]:
    for words, layer in _LAYERS.items():
        for name, packing in _PACKINGS.items():

            def call(subject: Subject, dtype: torch.dtype, layer: Layer = layer, one: Packing = packing) -> Comparison:
                return packed(subject, layer, one, dtype)

            shape = (packing.rows(packing.queries), layer.heads, layer.v_size)
            yield f"attention in thd, {name}{words}", Nothing(call, shape), (Feature.THD, *layer.needs)


_LINEAR = (Feature.LINEAR_ATTENTION,)
_OTHERS: tuple[_Named, ...] = (
    (
        "attention in bshd, no queries",
        Nothing(lambda subject, dtype: padded(subject, Layer(4, 2), (2, 0, 3), dtype, "causal"), (2, 0, 4, 16)),
        (Feature.BSHD,),
    ),
    ("log-probs", Nothing(lambda subject, dtype: Problem(()).compared(subject, dtype), (0,), 2), ()),
    (
        "log-probs, all labels ignored",
        Nothing(lambda subject, dtype: Problem((-100, -1)).compared(subject, dtype), (2,), 2),
        (),
    ),
    ("linear", Nothing(lambda subject, dtype: linear_of(subject, dtype, (0, 8)), (0, 5)), ()),
    ("rms_norm", Nothing(lambda subject, dtype: rms_norm_of(subject, dtype, (0, 8)), (0, 8)), ()),
    (
        "rms_norm, heads, zero-centred",
        Nothing(lambda subject, dtype: rms_norm_of(subject, dtype, (0, 2, 16), zero_centered=True), (0, 2, 16)),
        (),
    ),
    ("layer_norm", Nothing(lambda subject, dtype: layer_norm_of(subject, dtype, (0, 8)), (0, 8)), ()),
    ("swiglu", Nothing(lambda subject, dtype: swiglu_of(subject, dtype, (0, 8)), (0, 4)), ()),
    (
        "rope",
        Nothing(lambda subject, dtype: rope_of(subject, dtype, (0, 2, 16), 8, interleaved=False), (0, 2, 16)),
        (),
    ),
    (
        "grouped_mm",
        Nothing(lambda subject, dtype: grouped_mm_of(subject, dtype, (0, 0)), (0, 16)),
        (Feature.MIXTURE_OF_EXPERTS,),
    ),
    (
        "causal_conv1d",
        Nothing(lambda subject, dtype: convolution_of(subject, dtype, (0, 0)), (1, 0, 6)),
        _LINEAR,
    ),
    ("gated_delta_rule", Nothing(lambda subject, dtype: delta_rule_of(subject, dtype, (0,)), (1, 0, 2, 8)), _LINEAR),
    (
        "gated_delta_rule, tokens after empty sequences",
        Nothing(lambda subject, dtype: delta_rule_of(subject, dtype, (0, 0), rest=3), (1, 3, 2, 8)),
        _LINEAR,
    ),
    ("state_space_scan", Nothing(lambda subject, dtype: scan_of(subject, dtype, (0,)), (1, 0, 4, 8)), _LINEAR),
    (
        "state_space_scan, tokens after empty sequences",
        Nothing(lambda subject, dtype: scan_of(subject, dtype, (0, 0), rest=3), (1, 3, 4, 8)),
        _LINEAR,
    ),
)


@rule(
    "kernel-no-rows",
    "kernels",
    "A kernel's result for no rows depends on its operands: each operand has a gradient of zeros, not a missing one.",
    cases=in_dtypes((*_OTHERS, *_packed_calls())),
)
def nothing_to_compute(subject: Subject, case: Case) -> None:
    """Call every kernel without anything to compute, as a rank does whose share of a micro-batch is empty.

    If sequences have fewer tokens than there are context-parallel ranks, some ranks have only padding; an expert may
    get no token. With a result that depends on no operand, such as new zeros, such a rank would skip the backward pass:
    it would never join the collectives there, and the other ranks would wait for it for ever.
    ``anytron.kernels.contract.zeros_from`` makes zeros that depend on operands.
    """
    dtype, nothing = case.values
    nothing.compared(subject, dtype).hold(subject)


RULES = (nothing_to_compute,)
