"""Tensors are on the device, and what is computed from them stays there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron.device.platform import Feature
from anytron_conformance.rules import Broken, Case, rule

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from anytron_conformance.subject import Subject

HOST = "cpu"

OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "addition": lambda x: x + 1,
    "matrix product": lambda x: x @ x.T,
    "softmax": lambda x: x.softmax(-1),
    "index_select": lambda x: x.index_select(0, torch.arange(2, device=x.device)),
    "sort": lambda x: x.sort(-1).values,
    "cumsum": lambda x: x.cumsum(-1),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "new_zeros": lambda x: x.new_zeros(2),
}


@rule(
    "own-device",
    "device",
    "An accelerator has a device of its own: its tensors are not the processor's.",
    needs=[Feature.OWN_DEVICE],
)
def own_device(subject: Subject, case: Case) -> None:
    """A platform that says `accelerator = True` and computes on the processor is a silent fallback.

    A platform for development whose device the processor plays says so in `limits()`: `Feature.OWN_DEVICE`.
    """
    del case
    if not subject.platform.accelerator:
        return
    made = torch.ones(2, 2, device=subject.device)
    found = {subject.runtime.device_type, subject.device.type, made.device.type, (made @ made).device.type}
    if HOST in found:
        raise Broken(
            "The platform says that it is an accelerator, and its tensors are the processor's.",
            f"device types {', '.join(sorted(found))}",
        )


@rule(
    "tensors-stay",
    "device",
    "A tensor that is made on the current device is there, and so is what is computed from it.",
    cases=[Case(name, name, index) for index, name in enumerate(OPERATIONS)],
)
def tensors_stay(subject: Subject, case: Case) -> None:
    """Common operations are called forward and backward, and compared with the processor's.

    An operator that the device's library lacks may come from the processor in silence, with its result left there.
    """
    operation = OPERATIONS[case.values]
    on_host = torch.linspace(-1.0, 1.0, 12).view(3, 4)
    results = []
    for device in (subject.device, torch.device(HOST)):
        operand = on_host.clone().to(device).requires_grad_()
        result = operation(operand)
        tensors = [result]
        if result.requires_grad:
            tensors += torch.autograd.grad(result.square().sum(), operand)
        for tensor in tensors:
            if tensor.device != operand.device:
                raise Broken("The result is on another device.", f"operand on {operand.device}, it on {tensor.device}")
        results.append([tensor.detach().cpu() for tensor in tensors])
    for found, expected in zip(*results, strict=True):
        if not torch.allclose(found, expected, rtol=1e-4, atol=1e-5):
            raise Broken("The result is another one than the processor's.", f"{found}, expected {expected}")
