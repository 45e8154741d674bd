"""Rules of company-invariant kernels: the bits of a row's result do not depend on what else is in the call.

They ask the hooks as engines do with ``engine.on_policy: bitwise``, and compare bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anytron.device.platform import Feature
from anytron.kernels.contract import NEVER_INVARIANT, KernelName, KernelSpec, LogProbSpec
from anytron_conformance.compare import assert_same_bits
from anytron_conformance.kernels.behaviour import SAMPLES
from anytron_conformance.kernels.comparison import drawn, in_dtypes
from anytron_conformance.rules import Case, rule

if TYPE_CHECKING:
    from collections.abc import Callable

    from anytron.kernels.contract import LogProbKernel
    from anytron_conformance.subject import Subject

NEEDS = (Feature.COMPANY_INVARIANCE,)
ROWS = 1000
"""Rows of the largest call."""
COUNTS = (1, 2, 3, 15, 16, 17, 33, 64, 257)
"""Rows of the other calls."""


@rule(
    "invariant-values",
    "kernels",
    "A company-invariant kernel computes what every other kernel of its kind computes, in values and gradients.",
    needs=NEEDS,
    cases=in_dtypes(
        (name, sample, sample.needs)
        for name, sample in SAMPLES.items()
        if name not in {one.value for one in NEVER_INVARIANT}
    ),
)
def values(subject: Subject, case: Case) -> None:
    """Let the hooks ask for company-invariant kernels, as engines do, and compare the kernels with float64.

    The kernels that a platform has for this mode are often other ones, with a backward pass of their own.
    """
    dtype, sample = case.values
    before, subject.hooks.invariant = subject.hooks.invariant, True
    try:
        for comparison in sample.calls(subject, dtype):
            comparison.hold(subject)
    finally:
        subject.hooks.invariant = before


def _fused(subject: Subject, name: KernelName, dtype: torch.dtype, **options: Any) -> Callable[..., Any]:
    return subject.hooks.fused_kernel(name, KernelSpec(subject.device.type, dtype, options, invariant=True))


def compare_rows(compute: Callable[[Tensor], Tensor], rows: Tensor) -> None:
    """Compute rows in calls of several sizes, at several places, and beside other values.

    Args:
        compute: Function of rows ``[n, ...]`` that returns a result ``[n, ...]``; n is at least 1.
        rows: :data:`ROWS` rows.

    Raises:
        Broken: The bits of a row's result are not those that it has among all rows.
    """
    whole = compute(rows)
    for count in COUNTS:
        for place, first in (("first", 0), ("middle", (ROWS - count) // 2), ("last", ROWS - count)):
            part = slice(first, first + count)
            company = f"the {place} of {ROWS} rows, in a call of {count} rows"
            assert_same_bits(compute(rows[part]), whole[part], company)
    turned = rows.flip(0)
    assert_same_bits(compute(turned).flip(0), whole, f"{ROWS} rows, in the opposite order")
    others = turned * 100
    for place, index in (("first", 0), ("middle", ROWS // 2), ("last", ROWS - 1)):
        others[index] = rows[7]
        found = compute(others)[index : index + 1]
        assert_same_bits(found, whole[7:8], f"a row at the {place} place, among rows of other values")


PRODUCTS = ((64, 300), (63, 40), (576, 300), (1024, 70), (2048, 300))
"""Sizes K and N. In bfloat16 a library may choose by the number of rows only from hundreds of entries on."""


@rule(
    "invariant-products",
    "kernels",
    "Each entry of a company-invariant product depends on its row and its row of the weight only, to the bit.",
    needs=NEEDS,
    cases=in_dtypes(
        (f"{name.value}, {size} x {entries}", (name, size, entries), needs)
        for name, needs in ((KernelName.LINEAR, ()), (KernelName.GROUPED_MM, (Feature.MIXTURE_OF_EXPERTS,)))
        for size, entries in (PRODUCTS if name is KernelName.LINEAR else PRODUCTS[::3])
    ),
)
def products(subject: Subject, case: Case) -> None:
    """Call ``linear`` and ``grouped_mm`` with ``spec.invariant``, and compare bytes with a call of 1000 rows.

    Calls have 1 to 257 of the rows, at the beginning, in the middle and at the end, in the opposite order, and among
    rows of other values; ``linear`` also has other rows of the weight beside, and ``grouped_mm`` other groups.
    A kernel breaks the rule if it chooses its tiles, its order of sums or a split of K by the number of rows or of
    entries, as most libraries do. Gradients may depend on all rows.
    """
    dtype, (name, size, entries) = case.values
    kernel = _fused(subject, name, dtype)
    rows, weight, bias = (
        (one / size**0.5).to(subject.device, dtype)
        for one in (drawn(ROWS, size), drawn(entries, size, seed=1), drawn(entries, seed=2))
    )
    if name is KernelName.LINEAR:
        compare_rows(lambda x: kernel(x, weight, bias), rows)
        _compare_columns(lambda rows_of_weight: kernel(rows[:65], rows_of_weight, None), weight)
        found = kernel(rows.view(4, -1, size), weight, bias).flatten(0, 1)
        assert_same_bits(found, kernel(rows, weight, bias), f"{ROWS} rows, in a call of 4 x {ROWS // 4}")
    else:
        weights = [weight.flip(0), weight, -weight]
        compare_rows(lambda x: kernel(x, weights, [0, len(x), 0]), rows)
        whole = kernel(rows, weights, [0, ROWS, 0])
        for before, after in ((1, 0), (17, 33), (500, 300)):
            part = slice(before, ROWS - after)
            found = kernel(rows, weights, [before, ROWS - before - after, after])
            assert_same_bits(found[part], whole[part], f"a group, with groups of {before} and {after} rows beside")


def _compare_columns(multiply: Callable[[Tensor], Tensor], weight: Tensor) -> None:
    whole, count = multiply(weight), len(weight)
    for first, last in ((0, 1), (5, count - 1), (count // 2, count)):
        found = multiply(weight[first:last])
        assert_same_bits(found, whole[:, first:last], f"entries {first} to {last - 1}, without the weight's other rows")
    assert_same_bits(multiply(weight.flip(0)).flip(1), whole, "with the weight's rows in the opposite order")


@dataclass(frozen=True)
class Vocabulary:
    """An output layer.

    Attributes:
        entries: Real entries.
        size: Size of hidden states.
        rows: Tokens of the largest call.
    """

    entries: int
    size: int
    rows: int


VOCABULARIES = (Vocabulary(301, 1024, 600), Vocabulary(50000, 64, 257))


@rule(
    "invariant-log-prob",
    "kernels",
    "A token's log-prob and entropy depend on its hidden state, its label and the weight only, to the bit.",
    needs=NEEDS,
    cases=in_dtypes((f"{one.entries} entries, {one.size} wide", one, ()) for one in VOCABULARIES),
)
def log_prob(subject: Subject, case: Case) -> None:
    """Score tokens in one call, and compare bytes with calls of fewer tokens, at other places and beside others.

    Rollout scores a few tokens at a time, and training thousands. The limit ``chunk_tokens``, and the rows that fill
    up the vocabulary, may differ too. A kernel breaks the rule if the width of its tiles depends on the number of
    tokens, or if it has another formula for the last tokens.
    """
    dtype, one = case.values
    hidden = drawn(one.rows, one.size).to(subject.device, dtype)
    weight = (drawn(one.entries + 48, one.size, seed=1) / one.size**0.5).to(subject.device, dtype)
    labels = torch.arange(one.rows, device=subject.device) * 7919 % one.entries

    def kernel(chunk_tokens: int) -> LogProbKernel:
        spec = LogProbSpec(one.entries, 1, chunk_tokens, subject.device.type, dtype, invariant=True)
        return subject.hooks.log_prob_kernel(spec)

    def score(part: slice, kernel: LogProbKernel, weight: Tensor = weight) -> Tensor:
        return torch.stack(kernel(hidden[part], weight, labels[part], 0.7, None), dim=1)

    usual, every = kernel(1024), slice(0, one.rows)
    whole = score(every, usual)
    for count in (1, 3, 16, 65):
        for place, first in (("first", 0), ("last", one.rows - count)):
            part = slice(first, first + count)
            company = f"the {place} of {one.rows} tokens, in a call of {count}"
            assert_same_bits(score(part, usual), whole[part], company)
    found = score(every, kernel(16))
    assert_same_bits(found, whole, f"{one.rows} tokens, with chunk_tokens of 16 instead of 1024")
    found = score(slice(0, 17), usual, weight[: one.entries])
    assert_same_bits(found, whole[:17], "17 tokens, with a vocabulary that is not filled up")
    others = torch.stack(usual(hidden.flip(0), weight, labels.flip(0), 0.7, None), dim=1).flip(0)
    assert_same_bits(others, whole, f"{one.rows} tokens, in the opposite order")
    ignored = labels.masked_fill(torch.arange(one.rows, device=labels.device) % 3 != 0, -100)
    found = torch.stack(usual(hidden, weight, ignored, 0.7, None), dim=1)
    assert_same_bits(found[::3], whole[::3], f"{one.rows} tokens, of which others are ignored")


WIDTHS = (63, 576, 2048)
ROPE = ((6, 1), (64, 0), (64, 64))
"""Entries of a head that turn, and the others."""


@rule(
    "invariant-rows",
    "kernels",
    "Norms, swiglu and rope that must be company-invariant compute a row with the same bits in every call.",
    needs=NEEDS,
    cases=in_dtypes(
        [
            *(
                (f"{name.value}, {width} wide", (name, width), ())
                for name in (KernelName.RMS_NORM, KernelName.LAYER_NORM, KernelName.SWIGLU)
                for width in WIDTHS
            ),
            *(
                (f"rope, {turned} of {turned + rest} turn", (KernelName.ROPE, turned, rest), ())
                for turned, rest in ROPE
            ),
        ]
    ),
)
def rows(subject: Subject, case: Case) -> None:
    """Call ``rms_norm``, ``layer_norm``, ``swiglu`` and ``rope`` with ``spec.invariant``, and compare bytes.

    The sizes of calls and the places of rows are those of ``invariant-products``; widths are odd, too. A kernel breaks
    the rule if it splits a row's sum by the number of rows, or has another formula for the end of a buffer that no
    vector fills.
    """
    dtype, (name, *sizes) = case.values
    compute, width = _row_kernel(subject, name, dtype, *sizes)
    compare_rows(compute, drawn(ROWS, width).to(subject.device, dtype))


def _row_kernel(
    subject: Subject, name: KernelName, dtype: torch.dtype, size: int, rest: int = 0
) -> tuple[Callable[[Tensor], Tensor], int]:
    """A function of rows, and their width."""
    if name is KernelName.SWIGLU:
        return _fused(subject, name, dtype), 2 * size
    if name is KernelName.ROPE:
        turn = _fused(subject, name, dtype)
        angles = 37.0 * 0.1 ** torch.linspace(0, 3, size // 2, device=subject.device)

        def turned(x: Tensor) -> Tensor:
            # The position of a token depends on the token, so that it is the same in each call.
            positions = x[:, 0].float().mul(100).round()
            freqs = torch.outer(positions, torch.cat([angles, angles]))[:, None]
            heads: Tensor = turn(x.view(len(x), 2, -1), freqs, False)
            return heads.flatten(1)

        return turned, 2 * (size + rest)
    weight, bias = (drawn(size, seed=seed).to(subject.device, dtype) for seed in (1, 2))
    norm = _fused(subject, name, dtype, eps=1e-6, zero_centered=False)
    if name is KernelName.RMS_NORM:
        return lambda x: norm(x, weight, 1e-6, False), size
    return lambda x: norm(x, weight, bias, 1e-6, False), size


RULES = (values, products, log_prob, rows)
