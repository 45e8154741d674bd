"""Rules of the fused kernels; their signatures are those of the neutral defaults in :mod:`anytron.kernels.fused`."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anytron.device.platform import Feature
from anytron.kernels.contract import KernelName, KernelSpec
from anytron.kernels.oracles.formulas import (
    reference_adam,
    reference_grouped_mm,
    reference_layer_norm,
    reference_rms_norm,
    reference_rope,
    reference_swiglu,
)
from anytron_conformance.compare import assert_close
from anytron_conformance.kernels.comparison import Comparison, drawn, in_dtypes, sliced, split_off
from anytron_conformance.rules import Broken, Case, rule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from anytron_conformance.subject import Subject


SHAPES = ((3, 8), (7, 1, 2, 32), (5, 3, 64), (4, 129))
"""Shapes of inputs of norms: hidden states, heads of queries, and sizes that no block size divides."""
MANY = (2**16, 8)
"""Shape of an input of norms with as many rows as a micro-batch has tokens, or heads of tokens."""
LAYINGS = (("contiguous", torch.Tensor.contiguous), ("parts of one tensor", split_off), ("every other number", sliced))


def fused(subject: Subject, name: KernelName, dtype: torch.dtype, **options: Any) -> Callable[..., Any]:
    """Return the kernel that a module of a model gets."""
    return subject.hooks.fused_kernel(name, KernelSpec(subject.device.type, dtype, options))


def linear_of(
    subject: Subject, dtype: torch.dtype, shape: tuple[int, ...], bias: bool = True, **others: Any
) -> Comparison:
    """Return the comparison of ``linear`` with a weight ``[5, K]``, where ``shape`` is that of the input."""
    kernel = fused(subject, KernelName.LINEAR, dtype)
    operands = {"input": drawn(*shape), "weight": drawn(5, shape[-1], seed=1)}
    if bias:
        operands["bias"] = drawn(5, seed=2)

    def definition(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        product = (x[..., None, :] * weight).sum(-1)
        return product if bias is None else product + bias

    return Comparison(lambda x, weight, bias=None: kernel(x, weight, bias), definition, operands, dtype, **others)


@rule(
    "linear",
    "kernels",
    "linear multiplies rows by a weight and adds the bias, if there is one, in values and gradients.",
    cases=in_dtypes(
        (f"{list(shape)}, {name}, {'bias' if bias else 'no bias'}", (shape, lay, bias), ())
        for shape, name, lay in (
            ((1, 3), *LAYINGS[0]),
            ((33, 2, 17), *LAYINGS[0]),
            ((3, 8), *LAYINGS[1]),
            ((3, 8), *LAYINGS[2]),
        )
        for bias in (True, False)
    ),
)
def linear(subject: Subject, case: Case) -> None:
    """Multiply rows ``[..., K]``, and compare with float64. The weight is ``[N, K]``; the bias may be None."""
    dtype, (shape, lay, bias) = case.values
    linear_of(subject, dtype, shape, bias, lay=lay).hold(subject)


def rms_norm_of(
    subject: Subject, dtype: torch.dtype, shape: tuple[int, ...], zero_centered: bool = False, **others: Any
) -> Comparison:
    """Return the comparison of ``rms_norm`` on rows whose mean square is about ``eps``; the first row is 0."""
    eps = 0.1
    kernel = fused(subject, KernelName.RMS_NORM, dtype, eps=eps, zero_centered=zero_centered)
    operands = {"input": _rows(shape), "weight": drawn(shape[-1], seed=1)}
    return Comparison(
        lambda x, weight: kernel(x, weight, eps, zero_centered),
        lambda x, weight: reference_rms_norm(x, weight, eps, zero_centered),
        operands,
        dtype,
        **others,
    )


def layer_norm_of(
    subject: Subject,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    zero_centered: bool = False,
    bias: bool = True,
    **others: Any,
) -> Comparison:
    """Return the comparison of ``layer_norm`` with its definition, on the same rows as in :func:`rms_norm_of`."""
    eps = 0.1
    kernel = fused(subject, KernelName.LAYER_NORM, dtype, eps=eps, zero_centered=zero_centered)
    operands = {"input": _rows(shape), "weight": drawn(shape[-1], seed=1)}
    if bias:
        operands["bias"] = drawn(shape[-1], seed=2)
    return Comparison(
        lambda x, weight, bias=None: kernel(x, weight, bias, eps, zero_centered),
        lambda x, weight, bias=None: reference_layer_norm(x, weight, bias, eps, zero_centered),
        operands,
        dtype,
        **others,
    )


def _rows(shape: tuple[int, ...]) -> Tensor:
    if shape == MANY:
        return drawn(shape[-1], seed=2) + drawn(*shape) / 10  # alike
    numbers = drawn(*shape) / 3
    numbers.flatten(0, -2)[:1] = 0.0
    return numbers


def _norm_cases() -> list[tuple[str, Any, tuple[Feature, ...]]]:
    shapes = [(f"{list(shape)}", (shape, LAYINGS[0][1])) for shape in SHAPES]
    laid = [(f"{list(SHAPES[1])}, {name}", (SHAPES[1], lay)) for name, lay in LAYINGS[1:]]
    many = (f"{list(MANY)}, added up", (MANY, LAYINGS[0][1]))
    return [
        (f"{name}, {'zero-centred' if zero_centered else 'plain'}", (*values, zero_centered), ())
        for name, values in (*shapes, *laid, many)
        for zero_centered in (False, True)
    ]


def _added_up(comparison: Comparison) -> Comparison:
    """Add up the output's rows, so that each row has the same part in the gradients of factor and bias.

    A kernel that adds these up in bfloat16 loses the later rows: half a unit in the last place of a sum of 256 rows is
    one row.
    """
    kernel, definition = comparison.kernel, comparison.definition
    factor = 100.0 if comparison.dtype is torch.float32 else 1.0  # a sum in float32, row by row, is as far off

    def result(*operands: Tensor) -> Tensor:
        output = kernel(*operands)
        assert isinstance(output, Tensor)
        return output.float().sum(0).to(output.dtype)

    def expected(*operands: Tensor) -> Tensor:
        output = definition(*operands)
        assert isinstance(output, Tensor)
        return output.sum(0)

    return replace(comparison, kernel=result, definition=expected, factor=factor)


@rule(
    "rms-norm",
    "kernels",
    "rms_norm divides by the root of the mean square plus eps, and multiplies with weight, or 1 + weight.",
    cases=in_dtypes(_norm_cases()),
)
def rms_norm(subject: Subject, case: Case) -> None:
    """Normalise hidden states and heads ``[T, heads, D]``, with an ``eps`` that is not small, and compare with float64.

    Both ``eps`` and ``zero_centered`` come with every call. A kernel breaks the rule if its gradient lacks the part
    through the mean square, if the weight gets no gradient, or if the gradients of many rows are added up in bfloat16.
    """
    dtype, (shape, lay, zero_centered) = case.values
    comparison = rms_norm_of(subject, dtype, shape, zero_centered, lay=lay)
    (_added_up(comparison) if shape == MANY else comparison).hold(subject)


@rule(
    "layer-norm",
    "kernels",
    "layer_norm subtracts the mean, divides by the root of the variance plus eps, and applies factor and bias.",
    cases=in_dtypes(
        (f"{name}, {'bias' if bias else 'no bias'}", (*values, bias), needs)
        for name, values, needs in _norm_cases()
        for bias in (True, False)
    ),
)
def layer_norm(subject: Subject, case: Case) -> None:
    """Normalise with and without bias; the factor is ``weight``, or ``1 + weight`` if ``zero_centered``."""
    dtype, (shape, lay, zero_centered, bias) = case.values
    comparison = layer_norm_of(subject, dtype, shape, zero_centered, bias, lay=lay)
    (_added_up(comparison) if shape == MANY else comparison).hold(subject)


def swiglu_of(subject: Subject, dtype: torch.dtype, shape: tuple[int, ...], **others: Any) -> Comparison:
    """Return the comparison of ``swiglu`` on an input of a shape."""
    kernel = fused(subject, KernelName.SWIGLU, dtype)
    return Comparison(kernel, reference_swiglu, {"input": drawn(*shape)}, dtype, **others)


@rule(
    "swiglu",
    "kernels",
    "swiglu multiplies SiLU of the first half of the last dimension with the second half.",
    cases=in_dtypes(
        [
            *((f"{list(shape)}", (shape, LAYINGS[0][1]), ()) for shape in ((1, 2), (0, 8), (3, 1, 10), (5, 3, 66))),
            *((f"[4, 3, 16], {name}", ((4, 3, 16), lay), ()) for name, lay in LAYINGS[1:]),
        ]
    ),
)
def swiglu(subject: Subject, case: Case) -> None:
    """Call ``swiglu``, also without rows, as an expert without tokens does. A kernel must not swap the halves."""
    dtype, (shape, lay) = case.values
    swiglu_of(subject, dtype, shape, lay=lay).hold(subject)


def rope_of(
    subject: Subject,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    turned: int,
    interleaved: bool,
    rows: int = 1,
    **others: Any,
) -> Comparison:
    """Return the comparison of ``rope`` with angles ``[T, rows, 1, ..., R]``; R = ``turned``.

    Positions are 0, 37, 74, ... in the first row; each further row begins 5 later.
    """
    kernel = fused(subject, KernelName.ROPE, dtype)
    positions = 37.0 * torch.arange(shape[0])[:, None] + 5.0 * torch.arange(rows)
    angles = positions[..., None] * 0.1 ** torch.linspace(0, 3, turned // 2)
    doubled = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
    freqs = doubled.view(shape[0], rows, *[1] * (len(shape) - 3), turned)
    told = freqs.to(subject.device)
    return Comparison(
        lambda x: kernel(x, told, interleaved),
        lambda x: reference_rope(x, freqs, interleaved),
        {"input": drawn(*shape)},
        dtype,
        **others,
    )


@rule(
    "rope",
    "kernels",
    "rope turns pairs of the first entries of each head by the given angles; the other entries stay as they are.",
    cases=in_dtypes(
        (f"{list(shape)}, {turned} turn, {'neighbours' if interleaved else 'halves'}, {name}", values, ())
        for shape, turned, rows, name, lay in (
            ((1, 1, 4), 4, 1, *LAYINGS[0]),
            ((5, 3, 16), 16, 1, *LAYINGS[0]),
            ((5, 3, 16), 8, 1, *LAYINGS[0]),
            ((6, 2, 3, 80), 64, 1, *LAYINGS[0]),
            ((6, 2, 3, 80), 64, 2, "each row has its own angles", LAYINGS[0][1]),
            ((5, 3, 16), 8, 1, *LAYINGS[1]),
            ((5, 3, 16), 16, 1, *LAYINGS[2]),
        )
        for interleaved in (False, True)
        for values in ((shape, turned, interleaved, rows, lay),)
    ),
)
def rope(subject: Subject, case: Case) -> None:
    """Rotate heads ``[T, heads, D]`` and ``[S, B, heads, D]``, and compare with a rotation of complex numbers.

    A pair is the entries i and i + R / 2, or two neighbours if ``interleaved``. Padded rows with images have angles of
    their own, because an image takes fewer positions than tokens. The gradient must be rotated back: a kernel that
    rotates it in the same direction as the values breaks the rule, and so does one that takes all angles from the
    first row.
    """
    dtype, (shape, turned, interleaved, rows, lay) = case.values
    rope_of(subject, dtype, shape, turned, interleaved, rows, lay=lay).hold(subject)


def grouped_mm_of(subject: Subject, dtype: torch.dtype, splits: tuple[int, ...], **others: Any) -> Comparison:
    """Return the comparison of ``grouped_mm`` with weights ``[16, 8]``, one for each of the groups in ``splits``."""
    kernel = fused(subject, KernelName.GROUPED_MM, dtype)
    weights = {f"weight of group {group}": drawn(16, 8, seed=group + 1) for group in range(len(splits))}
    return Comparison(
        lambda x, *weights: kernel(x, list(weights), list(splits)),
        lambda x, *weights: reference_grouped_mm(x, weights, splits),
        {"input": drawn(sum(splits), 8), **weights},
        dtype,
        **others,
    )


@rule(
    "grouped-mm",
    "kernels",
    "grouped_mm multiplies each group of rows with its own matrix; a group without rows has a gradient of zeros.",
    needs=(Feature.MIXTURE_OF_EXPERTS,),
    cases=in_dtypes(
        [
            *(
                (f"groups of {splits}", (splits, LAYINGS[0][1]), ())
                for splits in ((1,), (2, 3), (2, 0, 3), (0, 0, 4), (0, 0), (33, 1, 0, 130))
            ),
            *((f"groups of (2, 0, 3), {name}", ((2, 0, 3), lay), ()) for name, lay in LAYINGS[1:]),
        ]
    ),
)
def grouped_mm(subject: Subject, case: Case) -> None:
    """Multiply groups of rows, of which some or all are empty.

    An expert without tokens has a gradient of zeros, not a missing one, because data-parallel ranks sum gradients. A
    kernel that writes no such gradient, or shifts the groups after an empty one, breaks the rule.
    """
    dtype, (splits, lay) = case.values
    grouped_mm_of(subject, dtype, splits, lay=lay).hold(subject)


RULES = (linear, rms_norm, layer_norm, swiglu, rope, grouped_mm)


PARAMETER_SHAPES = ((1,), (5,), (3, 7), (2, 1, 129))
ADAM: Mapping[str, Any] = MappingProxyType({"lr": 0.02, "beta1": 0.9, "beta2": 0.95, "eps": 0.01})


def adam_of(subject: Subject, dtype: torch.dtype, shape: tuple[int, ...]) -> Comparison:
    """Return the comparison of parameters after a step of AdamW from moments of zero; gradients are not compared."""
    step_of = fused(subject, KernelName.ADAM, torch.float32)
    form = {**ADAM, "decoupled": True, "weight_decay": 0.3, "bias_correction": True}

    def stepped(param: Tensor, grad: Tensor) -> Tensor:
        after = param.clone()
        moments = [[torch.zeros_like(param, dtype=torch.float32)] for _ in range(2)]
        step_of([after], [grad], *moments, step=1, **form)
        return after

    operands = {"parameter": drawn(*shape), "gradient": drawn(*shape, seed=1) / 10}
    return Comparison(
        stepped,
        lambda param, grad: reference_adam(param, [grad], **form)[0],
        operands,
        dtype,
        outputs=("parameter afterwards",),
        frozen=tuple(operands),
    )


def _adam_cases() -> list[Case]:
    found: list[Case] = []
    for dtype in (torch.float32, torch.bfloat16):
        needs = (Feature.BFLOAT16,) if dtype is torch.bfloat16 else ()
        for decoupled in (True, False):
            for weight_decay in (0.0, 0.3):
                for bias_correction in (True, False):
                    name = (
                        f"{'AdamW' if decoupled else 'Adam'}, weight decay {weight_decay:g}, "
                        f"{'with' if bias_correction else 'without'} bias correction, {str(dtype)[6:]} parameters"
                    )
                    values = (
                        dtype,
                        {"decoupled": decoupled, "weight_decay": weight_decay, "bias_correction": bias_correction},
                    )
                    found.append(Case(name, values, len(found), needs))
    return found


@rule(
    "adam",
    "kernels",
    "adam makes one step of Adam or AdamW on all tensors, in place, in float32 whatever the parameters' dtype.",
    cases=_adam_cases(),
)
def adam(subject: Subject, case: Case) -> None:
    """Take steps from moments of zero, and compare parameters and both moments with float64.

    There are three steps, but only one for 16-bit parameters, because each step rounds them. ``eps``, both forms of
    weight decay and bias correction have visible effects. Gradients must not be changed.
    """
    dtype, form = case.values
    step_of = fused(subject, KernelName.ADAM, torch.float32)
    starts = [drawn(*shape, seed=seed).to(dtype) for seed, shape in enumerate(PARAMETER_SHAPES)]
    params = [start.to(subject.device, copy=True) for start in starts]
    moments = [[torch.zeros_like(param, dtype=torch.float32) for param in params] for _ in range(2)]
    # Near 0.1, where eps matters.
    history = [
        [(drawn(*shape, seed=10 * step + seed) / 10).to(dtype) for seed, shape in enumerate(PARAMETER_SHAPES)]
        for step in range(1, 4 if dtype is torch.float32 else 2)
    ]
    for number, grads in enumerate(history, start=1):
        given = [grad.to(subject.device, copy=True) for grad in grads]
        step_of(params, given, *moments, step=number, **ADAM, **form)
        for one, grad in zip(given, grads, strict=True):
            if not torch.equal(one.cpu(), grad):
                raise Broken("The kernel wrote over the gradients that it was given.")
    for index, start in enumerate(starts):
        wanted = reference_adam(start, [grads[index] for grads in history], **ADAM, **form)
        found = (params[index], moments[0][index], moments[1][index])
        dtypes = (dtype, torch.float32, torch.float32)
        names = ("parameter", "first moment", "second moment")
        for name, one, right, kept in zip(names, found, wanted, dtypes, strict=True):
            if one.dtype != kept:
                raise Broken(f"A {name} has a different dtype afterwards.", f"it is {one.dtype}, expected {kept}")
            assert_close(one, right, f"The {name} of shape {list(PARAMETER_SHAPES[index])}", dtype=kept)
