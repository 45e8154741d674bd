"""Device memory statistics, and queued work: streams, synchronisation, copies from pinned memory."""

from __future__ import annotations

import gc
import math
import mmap
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from anytron.device.runtime import DeviceRuntime
from anytron.proof.checks import Inapplicable
from anytron_conformance.rules import Broken, rule

if TYPE_CHECKING:
    from anytron_conformance.rules import Case
    from anytron_conformance.subject import Subject


BYTES = 64 << 20
"""Size of the tensor that is made and freed, in bytes: much more than any other allocation at the same time."""
SLACK = BYTES // 8
ENDLESS = 1 << 50
"""A number of bytes that no device has."""


class Figures(NamedTuple):
    """What `memory_stats` returns, with figures that are known; `total` may be unknown."""

    allocated: int
    peak_allocated: int
    reserved: int
    total: int | None


def _now(subject: Subject) -> Figures:
    subject.runtime.synchronize()
    gc.collect()
    found = subject.runtime.memory_stats()
    if found.allocated is None or found.peak_allocated is None or found.reserved is None:
        raise Inapplicable("the device's memory is unknown: memory_stats gives None")
    return Figures(found.allocated, found.peak_allocated, found.reserved, found.total)


def _made(subject: Subject) -> torch.Tensor:
    """Make a tensor of :data:`BYTES` and write to it: memory that is only promised does not count everywhere.

    On the host, the tensor is a mapping of its own. The C library could take it from memory that was freed before, and
    whose pages the process keeps: then resident memory would neither grow nor shrink.
    """
    if subject.device.type != "cpu":
        return torch.ones(BYTES, dtype=torch.uint8, device=subject.device)
    memory = mmap.mmap(-1, BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).fill_(1)


@rule(
    "memory-figures",
    "device",
    "memory_stats: allocated grows with a tensor and shrinks when it is freed; allocated <= reserved <= total.",
)
def memory_figures(subject: Subject, case: Case) -> None:
    """A tensor of 64 MiB is made and freed; `empty_cache` gives its memory back.

    Reports, the memory estimate and rollouts that share a device rely on the figures. Usual faults: KiB instead of
    bytes, the memory of another device, the peak instead of the current value.
    """
    del case
    _made(subject)  # what the first tensor brings along is not counted
    subject.runtime.empty_cache()
    before = _now(subject)
    tensor = _made(subject)
    during = _now(subject)
    del tensor
    freed = _now(subject)
    subject.runtime.empty_cache()
    after = _now(subject)
    grown, left = during.allocated - before.allocated, freed.allocated - before.allocated
    if abs(grown - BYTES) > SLACK:
        raise Broken("allocated does not grow by the size of a tensor.", f"{grown} bytes for one of {BYTES}")
    if left > SLACK:
        raise Broken("allocated does not shrink when a tensor is freed.", f"{left} bytes of {BYTES} are left")
    if after.reserved - before.reserved > SLACK:
        raise Broken("empty_cache releases too little.", f"{after.reserved - before.reserved} more bytes are reserved")
    for stats in (before, during, freed, after):
        if not 0 <= stats.allocated <= stats.reserved <= (math.inf if stats.total is None else stats.total):
            raise Broken("0 <= allocated <= reserved <= total does not hold.", f"{stats}")


@rule(
    "peak-memory",
    "device",
    "peak_allocated is at least what was allocated at any time since reset_peak_memory_stats.",
)
def peak_memory(subject: Subject, case: Case) -> None:
    """A tensor of 64 MiB is made and freed, and then the peak is reset: the next peak must not include the tensor.

    A runtime that does not override `reset_peak_memory_stats` counts from the start of the process. Then
    only the peak of the first tensor is checked, and the check after the reset is counted as skipped.
    """
    del case
    _made(subject)  # what the first tensor brings along would hide the difference
    subject.runtime.reset_peak_memory_stats()
    tensor = _made(subject)
    during = _now(subject)
    del tensor
    after = _now(subject)
    for stats in (during, after):
        if stats.peak_allocated < during.allocated - SLACK // 8:
            raise Broken("The peak is too low.", f"{stats.peak_allocated} bytes, but {during.allocated} were allocated")
    if type(subject.runtime).reset_peak_memory_stats is DeviceRuntime.reset_peak_memory_stats:
        raise Inapplicable("the runtime does not reset peaks: they count from the start of the process")
    subject.runtime.reset_peak_memory_stats()
    left = _now(subject)
    if left.peak_allocated - left.allocated > SLACK:
        raise Broken(
            "reset_peak_memory_stats does not reset the peak.",
            f"it is {left.peak_allocated} bytes, and {left.allocated} are allocated",
        )


@rule(
    "out-of-memory",
    "device",
    "is_out_of_memory recognizes the error of an allocation that is too large, and no other error.",
)
def out_of_memory(subject: Subject, case: Case) -> None:
    """A petabyte is allocated. If a run is out of memory, it prints advice; so the runtime must recognise the error."""
    del case
    try:
        torch.empty(ENDLESS, dtype=torch.uint8, device=subject.device)
    except Exception as error:
        if not subject.runtime.is_out_of_memory(error):
            raise Broken(
                "is_out_of_memory does not recognize the error.", f"{type(error).__name__}: {error}"
            ) from error
    else:
        raise Broken("Allocating a petabyte raised no error.")
    if subject.runtime.is_out_of_memory(ValueError("no memory of that")):
        raise Broken("is_out_of_memory takes another error for an out-of-memory error.")


METHODS = ("wait_stream", "wait_event", "record_event", "query", "synchronize")
ROUNDS, SIZE = 20, 256


def _long_work(subject: Subject) -> torch.Tensor:
    """Some products that end in a matrix of ones."""
    result = torch.eye(SIZE, device=subject.device)
    for _ in range(ROUNDS):
        result = result @ torch.eye(SIZE, device=subject.device)
    return result + (1 - torch.eye(SIZE, device=subject.device))


@rule(
    "streams-order-work",
    "device",
    "new_stream and current_stream give streams with the interface of torch.Stream, or both give None.",
)
def streams_order_work(subject: Subject, case: Case) -> None:
    """Work is queued on a second stream that waits for the first, and the first waits for it in turn.

    Leaving the `with` block of a stream makes the previous stream current again, also after an error. Megatron's
    experts call `Tensor.record_stream` on a tensor that two streams use. The memory of this tensor must not be reused
    before both streams have finished with it.
    """
    del case
    stream, current = subject.runtime.new_stream(), subject.runtime.current_stream()
    if (stream is None) != (current is None):
        raise Broken("new_stream and current_stream must both give a stream, or both None.", f"{stream}, {current}")
    if stream is None:
        raise Inapplicable("the device runs everything in order: new_stream gives None")
    if missing := [name for name in METHODS if not callable(getattr(stream, name, None))]:
        raise Broken("A stream lacks methods of torch.Stream.", ", ".join(missing))
    ones = _long_work(subject)
    stream.wait_stream(current)
    with stream:
        if subject.runtime.current_stream() != stream:
            raise Broken("A with block does not make its stream the current one.")
        twos = ones + 1
        event = stream.record_event()
    if subject.runtime.current_stream() != current:
        raise Broken("Leaving a with block does not make the previous stream current again.")
    current.wait_event(event)
    if not bool((twos + 1 == 3).all()):
        raise Broken("A stream did not wait for the other stream.")
    try:
        twos.record_stream(current)
    except RuntimeError as error:  # also NotImplementedError: no such operator
        raise Broken(
            "Tensor.record_stream raises an error: Megatron's experts call it for tensors that two streams use.",
            f"{error}",
        ) from error
    _check_memory_is_kept(subject, stream)
    stream.synchronize()
    if not stream.query():
        raise Broken("A stream reports unfinished work after it was waited for.")


def _check_memory_is_kept(subject: Subject, stream: Any) -> None:
    """Free a tensor that the stream still has to read, and use memory of the same size at once."""
    length = 7 * SIZE * SIZE  # a size that no other tensor has, so that its memory is the first choice for the next one
    used = torch.full((length,), 2.0, device=subject.device)
    stream.wait_stream(subject.runtime.current_stream())
    with stream:
        result = _long_work(subject)[0, 0] * used
    used.record_stream(stream)
    del used
    float(torch.full((length,), 3.0, device=subject.device).sum())  # computed now, on the first stream
    stream.synchronize()
    if wrong := int((result != 2).sum()):
        raise Broken(
            "Memory was used again while another stream still read it: Tensor.record_stream does not keep it.",
            f"{wrong} numbers off",
        )


@rule("synchronize-waits", "device", "synchronize returns when all queued work is done.")
def synchronize_waits(subject: Subject, case: Case) -> None:
    """Long work is queued, with a non-blocking copy to the host; after `synchronize` the copy must be complete.

    Timings, copies and the end of a step rely on this.
    """
    del case
    pinned = subject.runtime.can_pin_memory()
    target = torch.zeros(SIZE, SIZE, pin_memory=True) if pinned else torch.zeros(SIZE, SIZE)
    target.copy_(_long_work(subject), non_blocking=True)
    subject.runtime.synchronize()
    if not bool((target == 1).all()):
        raise Broken("A copy to the host is incomplete after synchronize.", f"{int((target != 1).sum())} numbers off")


@rule("pinned-memory", "device", "Host memory can be pinned where can_pin_memory is true.")
def pinned_memory(subject: Subject, case: Case) -> None:
    """A pinned tensor is made, and copied to the device without blocking, if memory can be pinned."""
    del case
    if not subject.runtime.can_pin_memory():
        raise Inapplicable("can_pin_memory is False")
    try:
        tensor = torch.arange(1000).pin_memory()
    except RuntimeError as error:
        raise Broken("can_pin_memory is true, but pinning raises an error.", f"{error}") from error
    copy = tensor.to(subject.device, non_blocking=True)
    subject.runtime.synchronize()
    if not tensor.is_pinned() or not torch.equal(copy.cpu(), tensor):
        raise Broken("A pinned tensor does not say that it is pinned, or has other values on the device.")
