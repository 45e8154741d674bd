"""Rules of the kernels of recurrent layers: Gated DeltaNet and Mamba-2."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anytron.device.platform import Feature
from anytron.kernels.contract import KernelName
from anytron.kernels.oracles.formulas import (
    reference_causal_conv1d,
    reference_gated_delta_rule,
    reference_state_space_scan,
)
from anytron_conformance.kernels.comparison import Comparison, drawn, in_dtypes
from anytron_conformance.kernels.fused import LAYINGS, fused
from anytron_conformance.rules import Case, rule

if TYPE_CHECKING:
    from anytron_conformance.subject import Subject

SCALE = 0.3
"""Factor of the outputs of the gated delta rule."""
DECAY, STEP, RATE, SKIP = "decay", "step", "rate of the decay", "weight of the own input"


def _told(lengths: tuple[int, ...], rows: int, device: torch.device) -> Tensor | None:
    """``cu_seqlens``, or None where the sequences are rows."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device) if rows == 1 else None


def convolution_of(
    subject: Subject,
    dtype: torch.dtype,
    lengths: tuple[int, ...],
    *,
    rows: int = 1,
    rest: int = 0,
    bias: bool = True,
    silu: bool = True,
    **others: Any,
) -> Comparison:
    """Return the comparison of ``causal_conv1d`` with 6 channels and 4 taps.

    Args:
        subject: The platform.
        dtype: Element type of the operands.
        lengths: Lengths of the sequences.
        rows: 1 = the sequences are packed; otherwise the number of rows.
        rest: Tokens after the last sequence.
        bias: Whether there is a bias.
        silu: Whether SiLU is applied to the results.
        others: Fields of :class:`Comparison`.
    """
    kernel = fused(subject, KernelName.CAUSAL_CONV1D, dtype)
    told = _told(lengths, rows, subject.device)
    total = sum(lengths) + rest
    operands = {"input": drawn(rows, total // rows, 6), "weight": drawn(6, 4, seed=1)}
    if bias:
        operands["bias"] = drawn(6, seed=2)
    sequences = (*lengths, rest) if rest else lengths

    def definition(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return reference_causal_conv1d(x.flatten(0, 1), weight, bias, lengths=sequences, silu=silu).view(x.shape)

    return Comparison(
        lambda x, weight, bias=None: kernel(x, weight, bias, silu, told), definition, operands, dtype, **others
    )


@rule(
    "causal-conv1d",
    "kernels",
    "causal_conv1d sums the last tokens of a sequence, each times its tap; zeros stand before the first token.",
    needs=(Feature.LINEAR_ATTENTION,),
    cases=in_dtypes(
        [
            *(
                (name, {"lengths": lengths, **settings}, ())
                for name, lengths, settings in (
                    ("one token", (1,), {}),
                    ("lengths 2 5", (2, 5), {}),
                    ("lengths 2 5, neither bias nor SiLU", (2, 5), {"bias": False, "silu": False}),
                    ("lengths 3 0 1 6, 3 tokens after them", (3, 0, 1, 6), {"rest": 3}),
                    ("3 rows of 7", (7, 7, 7), {"rows": 3}),
                    ("2 rows of 2", (2, 2), {"rows": 2}),
                )
            ),
            *((f"lengths 2 5, {name}", {"lengths": (2, 5), "lay": lay}, ()) for name, lay in LAYINGS[1:]),
        ]
    ),
)
def convolution(subject: Subject, case: Case) -> None:
    """Convolve packed sequences and padded rows, some with fewer tokens than taps, and compare with the sum over taps.

    Packed sequences must not see their neighbours, forward or backward.
    """
    dtype, settings = case.values
    convolution_of(subject, dtype, **settings).hold(subject)


def delta_rule_of(
    subject: Subject, dtype: torch.dtype, lengths: tuple[int, ...], *, rows: int = 1, rest: int = 0, **others: Any
) -> Comparison:
    """Return the comparison of ``gated_delta_rule`` with 2 heads; arguments as for :func:`convolution_of`."""
    kernel = fused(subject, KernelName.GATED_DELTA_RULE, dtype)
    told = _told(lengths, rows, subject.device)
    total = sum(lengths) + rest
    shape = (rows, total // rows, 2)
    query, key = (torch.nn.functional.normalize(drawn(*shape, 16, seed=seed), dim=-1) for seed in (0, 1))
    operands = {
        "queries": query,
        "keys": key,
        "values": drawn(*shape, 8, seed=2),
        DECAY: -drawn(*shape, seed=3).abs() / 4,
        "strength": drawn(*shape, seed=4).sigmoid(),
    }

    def definition(*flat: Tensor) -> Tensor:
        packed = (operand.flatten(0, 1) for operand in flat)
        return reference_gated_delta_rule(*packed, lengths=lengths, scale=SCALE).view(*shape, 8)

    outside = torch.zeros(rows, total // rows, dtype=torch.bool)
    outside.view(-1)[sum(lengths) :] = True
    return Comparison(
        lambda q, k, v, g, beta: kernel(q, k, v, g, beta, SCALE, told),
        definition,
        operands,
        dtype,
        in_float32=(DECAY,),
        empty=outside,
        because="no sequence is",
        **others,
    )


@rule(
    "gated-delta-rule",
    "kernels",
    "gated_delta_rule equals its recurrence, token by token, from a state of zeros for each sequence.",
    needs=(Feature.LINEAR_ATTENTION,),
    cases=in_dtypes(
        [
            *(
                (name, {"lengths": lengths, **settings}, ())
                for name, lengths, settings in (
                    ("one token", (1,), {}),
                    ("lengths 2 5", (2, 5), {}),
                    ("lengths 3 0 1, 2 tokens after them", (3, 0, 1), {"rest": 2}),
                    ("3 rows of 4", (4, 4, 4), {"rows": 3}),
                    ("lengths 65 1 130", (65, 1, 130), {}),
                )
            ),
            *((f"lengths 2 5, {name}", {"lengths": (2, 5), "lay": lay}, ()) for name, lay in LAYINGS[1:]),
        ]
    ),
)
def delta_rule(subject: Subject, case: Case) -> None:
    """Run sequences that are shorter and longer than a chunk, and compare with the recurrence in float64.

    All five operands have gradients; the decay is float32 whatever the others are. Tokens after the last sequence give
    0 and get no gradient.
    """
    dtype, settings = case.values
    delta_rule_of(subject, dtype, **settings).hold(subject)


def scan_of(
    subject: Subject, dtype: torch.dtype, lengths: tuple[int, ...], *, rows: int = 1, rest: int = 0, **others: Any
) -> Comparison:
    """Return the comparison of ``state_space_scan`` with 4 heads in 2 groups; arguments as :func:`convolution_of`."""
    kernel = fused(subject, KernelName.STATE_SPACE_SCAN, dtype)
    told = _told(lengths, rows, subject.device)
    total = sum(lengths) + rest
    shape = (rows, total // rows)
    operands = {
        "input": drawn(*shape, 4, 8),
        STEP: drawn(*shape, 4, seed=1).abs() / 4,
        RATE: -drawn(4, seed=2).exp(),
        "keys": drawn(*shape, 2, 16, seed=3) / 4,
        "queries": drawn(*shape, 2, 16, seed=4) / 4,
        SKIP: drawn(4, seed=5),
    }

    def definition(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        x, dt, b, c = (part.flatten(0, 1) for part in (x, dt, b, c))
        return reference_state_space_scan(x, dt, a, b, c, d, lengths=lengths).view(*shape, 4, 8)

    outside = torch.zeros(shape, dtype=torch.bool)
    outside.view(-1)[sum(lengths) :] = True
    return Comparison(
        lambda *given: kernel(*given, told),
        definition,
        operands,
        dtype,
        in_float32=(STEP, RATE, SKIP),
        empty=outside,
        because="no sequence is",
        **others,
    )


@rule(
    "state-space-scan",
    "kernels",
    "state_space_scan equals its recurrence, token by token, from a state of zeros for each sequence.",
    needs=(Feature.LINEAR_ATTENTION,),
    cases=in_dtypes(
        [
            *(
                (name, {"lengths": lengths, **settings}, ())
                for name, lengths, settings in (
                    ("one token", (1,), {}),
                    ("lengths 2 5", (2, 5), {}),
                    ("lengths 3 0 1, 2 tokens after them", (3, 0, 1), {"rest": 2}),
                    ("3 rows of 4", (4, 4, 4), {"rows": 3}),
                    ("lengths 65 1 130", (65, 1, 130), {}),
                )
            ),
            *((f"lengths 2 5, {name}", {"lengths": (2, 5), "lay": lay}, ()) for name, lay in LAYINGS[1:]),
        ]
    ),
)
def scan(subject: Subject, case: Case) -> None:
    """Run sequences that are shorter and longer than a chunk, and compare with the recurrence in float64.

    All six operands have gradients; steps, rates and the weight of a token's own input are float32 whatever the others
    are. Two heads share each key and query. Tokens after the last sequence give 0 and get no gradient.
    """
    dtype, settings = case.values
    scan_of(subject, dtype, **settings).hold(subject)


RULES = (convolution, delta_rule, scan)
