"""The rule of the optimizer's kernel."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anytron.device.platform import Feature
from anytron.kernels.contract import KernelName
from anytron.kernels.oracles.formulas import reference_adam
from anytron_conformance.compare import assert_close
from anytron_conformance.kernels.comparison import Comparison
from anytron_conformance.kernels.fused import fused
from anytron_conformance.kernels.numbers import drawn
from anytron_conformance.rules import Broken, Case, rule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anytron_conformance.subject import Subject

SHAPES = ((1,), (5,), (3, 7), (2, 1, 129))
SETTINGS: Mapping[str, Any] = MappingProxyType({"lr": 0.02, "beta1": 0.9, "beta2": 0.95, "eps": 0.01})


def adam_of(subject: Subject, dtype: torch.dtype, shape: tuple[int, ...]) -> Comparison:
    """Compare parameters after a step of AdamW from moments of zero; there are no gradients of it."""
    step_of = fused(subject, KernelName.ADAM, torch.float32)
    form = {**SETTINGS, "decoupled": True, "weight_decay": 0.3, "bias_correction": True}

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


def _cases() -> list[Case]:
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
    cases=_cases(),
)
def adam(subject: Subject, case: Case) -> None:
    """Take steps from moments of zero, and compare parameters and both moments with float64.

    There are three steps, and one where parameters of 16 bits are rounded after it. ``eps`` matters, and so do weight
    decay in both forms and the correction of the bias. Gradients are not changed.
    """
    dtype, form = case.values
    step_of = fused(subject, KernelName.ADAM, torch.float32)
    starts = [drawn(*shape, seed=seed).to(dtype) for seed, shape in enumerate(SHAPES)]
    params = [start.to(subject.device, copy=True) for start in starts]
    moments = [[torch.zeros_like(param, dtype=torch.float32) for param in params] for _ in range(2)]
    # Near 0.1, where eps matters.
    history = [
        [(drawn(*shape, seed=10 * step + seed) / 10).to(dtype) for seed, shape in enumerate(SHAPES)]
        for step in range(1, 4 if dtype is torch.float32 else 2)
    ]
    for number, grads in enumerate(history, start=1):
        given = [grad.to(subject.device, copy=True) for grad in grads]
        step_of(params, given, *moments, step=number, **SETTINGS, **form)
        for one, grad in zip(given, grads, strict=True):
            if not torch.equal(one.cpu(), grad):
                raise Broken("The kernel wrote over the gradients that it was given.")
    for index, start in enumerate(starts):
        wanted = reference_adam(start, [grads[index] for grads in history], **SETTINGS, **form)
        found = (params[index], moments[0][index], moments[1][index])
        dtypes = (dtype, torch.float32, torch.float32)
        names = ("parameter", "first moment", "second moment")
        for name, one, right, kept in zip(names, found, wanted, dtypes, strict=True):
            if one.dtype != kept:
                raise Broken(f"A {name} has another dtype afterwards.", f"it is {one.dtype}, expected {kept}")
            assert_close(one, right, f"The {name} of shape {list(SHAPES[index])}", dtype=kept)


RULES = (adam,)
