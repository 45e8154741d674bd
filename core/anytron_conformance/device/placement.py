"""Rules about devices: the platform describes them, tensors stay on them, and they compute in the supported dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from anytron.device.loading import check_requirements
from anytron.device.platform import Availability, Feature, Probe, decisions_of, limits_of
from anytron.proof.checks import Inapplicable
from anytron_conformance.compare import assert_close
from anytron_conformance.ranks import Member, on_ranks
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
    "An accelerator's tensors are on its own device, not on the processor.",
    needs=[Feature.OWN_DEVICE],
)
def own_device(subject: Subject, case: Case) -> None:
    """A tensor is made and multiplied on the device: with `accelerator = True` the device type must not be `cpu`.

    A development platform that emulates its device on the CPU declares `Feature.OWN_DEVICE` in `limits()`.
    """
    del case
    if not subject.platform.accelerator:
        return
    made = torch.ones(2, 2, device=subject.device)
    found = {subject.runtime.device_type, subject.device.type, made.device.type, (made @ made).device.type}
    if HOST in found:
        raise Broken(
            "The platform says that it is an accelerator, but its tensors are on the processor.",
            f"device types {', '.join(sorted(found))}",
        )


@rule(
    "tensors-stay",
    "device",
    "A tensor that is made on the current device is there, and so are results that are computed from it.",
    cases=[Case(name, name, index) for index, name in enumerate(OPERATIONS)],
)
def tensors_stay(subject: Subject, case: Case) -> None:
    """Common operations are called forward and backward, and compared with those of the CPU.

    An operator that the device's library lacks may silently run on the CPU and leave its result there.
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
                raise Broken(
                    "The result is on another device.", f"operand on {operand.device}, result on {tensor.device}"
                )
        results.append([tensor.detach().cpu() for tensor in tensors])
    for found, expected in zip(*results, strict=True):
        if not torch.allclose(found, expected, rtol=1e-4, atol=1e-5):
            raise Broken("The result differs from the processor's.", f"{found}, expected {expected}")


@rule(
    "probe-and-runtime",
    "device",
    "The probe of a usable device gives the same answer at each call, and a process has one runtime, with as many "
    "devices as the probe counted.",
)
def probe_and_runtime(subject: Subject, case: Case) -> None:
    """`probe()` and `runtime()` are called twice each, and the current device is set again.

    A runtime made anew at each call loses its state; with a device count that differs from the probe's, a run could
    start without a device for some rank. A process uses one device; another rule checks that each rank has its own.
    """
    del case
    probes = [subject.platform.probe() for _ in range(2)]
    for probe in probes:
        if not isinstance(probe, Probe) or probe.availability is not Availability.USABLE:
            raise Broken("The probe says that the device is not usable, but this process uses it.", f"{probe}")
    if probes[0] != probes[1]:
        raise Broken("The probe gives a different answer at the second call.", f"{probes[0]}, then {probes[1]}")
    if subject.platform.runtime() is not subject.runtime:
        raise Broken("runtime() makes a new object at each call.")
    runtime, here = subject.runtime, subject.runtime.current_device()
    if not isinstance(here, torch.device):
        raise Broken("current_device() does not return a torch.device.", f"{here!r}")
    if here.type != runtime.device_type:
        raise Broken("The current device has a different type than the runtime.", f"{here}, {runtime.device_type}")
    count = runtime.device_count()
    if not isinstance(count, int):
        raise Broken("device_count() does not return a number.", f"{count!r}")
    if count < 1 or (subject.platform.accelerator and count != probes[0].devices):
        raise Broken("Probe and runtime count different numbers of devices.", f"{probes[0].devices} and {count}")
    runtime.set_device(here.index or 0)
    if runtime.current_device() != here:
        raise Broken("Setting the current device again changes it.", f"{here}, then {runtime.current_device()}")


@rule(
    "says-what-it-is",
    "device",
    "Name, decisions, limits and requirements keep their contracts, and required packages are installed.",
)
def says_what_it_is(subject: Subject, case: Case) -> None:
    """`decisions()`, `limits()` and the hook `requirements` are called, and a second platform object is made.

    The constructor must work on any machine, any number of times, because the loader makes an object of every installed
    platform.
    """
    del case
    platform = subject.platform
    decisions_of(platform)
    limits_of(platform)
    check_requirements(subject.hooks)
    if type(platform)().name != platform.name:
        raise Broken("A second object of the platform's class has a different name.")


@rule("ranks-own-devices", "device", "Each rank computes on the device that set_device gave it.", limit_s=360.0)
def ranks_own_devices(subject: Subject, case: Case) -> None:
    """Two ranks set the devices 0 and 1, and each checks the device of its tensors.

    Ranks that silently share the first device run out of its memory, or wait for each other for ever.
    """
    del case
    on_ranks(subject, 2, compare_device)


def compare_device(member: Member) -> None:
    """Check that this rank's tensors are on the device with the rank's number."""
    device = torch.ones(1, device=member.subject.device).device
    if device.index not in (None, member.rank):
        raise Broken("A rank's tensors are on another rank's device.", f"rank {member.rank} has them on {device}")


def convolution(images: Tensor, weights: Tensor) -> Tensor:
    """A convolution as in the first layer of a vision model."""
    return functional.conv3d(images, weights)


PRODUCT = ("The product", torch.matmul, ((16, 16), (16, 16)))
CONVOLUTION = ("The convolution", convolution, ((2, 3, 4, 8, 8), (16, 3, 2, 4, 4)))
CASES = [
    Case("float32", (torch.float32, *PRODUCT), 0),
    Case("float32, convolution", (torch.float32, *CONVOLUTION), 1),
    Case("bfloat16", (torch.bfloat16, *PRODUCT), 2, needs=(Feature.BFLOAT16,)),
    Case("float16", (torch.float16, *PRODUCT), 3),
]


@rule(
    "dtypes-compute",
    "device",
    "Matrix products run in every dtype for which supports_dtype is true, and keep it; so do convolutions in float32.",
    cases=CASES,
)
def dtypes_compute(subject: Subject, case: Case) -> None:
    """A product of two matrices of each supported dtype is compared with float64; float32 is always needed.

    Usual faults: the result has a wider or narrower dtype, or products are computed with fewer bits than the dtype has.
    A float32 convolution, as for patches of images, is compared too, because a library may round its operands to ten
    bits (cuDNN: TF32, which torch allows by default).
    """
    dtype, what, compute, shapes = case.values
    if not subject.runtime.supports_dtype(dtype):
        if dtype is torch.float32:
            raise Broken("supports_dtype is false for float32, which log-probs and main weights need.")
        raise Inapplicable(f"supports_dtype({case.name}) is False")
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    found = compute(one.to(subject.device), other.to(subject.device))
    if found.dtype != dtype:
        raise Broken(f"{what} has a different dtype.", f"{found.dtype} of operands in {dtype}")
    assert_close(found, compute(one.double(), other.double()), what, dtype=dtype)
