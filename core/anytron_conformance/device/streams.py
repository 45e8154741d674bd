"""Work that is queued: streams, synchronisation, copies from pinned memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron.proof.checks import Inapplicable
from anytron_conformance.rules import Broken, rule

if TYPE_CHECKING:
    from anytron_conformance.rules import Case
    from anytron_conformance.subject import Subject

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

    Leaving the `with` block of a stream makes the one before current again, also after an error.
    """
    del case
    stream, current = subject.runtime.new_stream(), subject.runtime.current_stream()
    if (stream is None) != (current is None):
        raise Broken("One of new_stream and current_stream gives None, the other a stream.", f"{stream}, {current}")
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
        raise Broken("Leaving a with block does not make the stream before it current.")
    current.wait_event(event)
    if not bool((twos + 1 == 3).all()):
        raise Broken("A stream did not wait for another.")
    stream.synchronize()
    if not stream.query():
        raise Broken("A stream that was waited for says that it has work.")


@rule("synchronize-waits", "device", "synchronize returns when all queued work is done.")
def synchronize_waits(subject: Subject, case: Case) -> None:
    """Long work is queued, with a copy to the host that does not block; after `synchronize` the copy is whole.

    Timings, copies and the end of a step rely on it.
    """
    del case
    pinned = subject.runtime.can_pin_memory()
    target = torch.zeros(SIZE, SIZE, pin_memory=True) if pinned else torch.zeros(SIZE, SIZE)
    target.copy_(_long_work(subject), non_blocking=True)
    subject.runtime.synchronize()
    if not bool((target == 1).all()):
        raise Broken("After synchronize a copy to the host is not whole.", f"{int((target != 1).sum())} numbers off")


@rule("pinned-memory", "device", "Host memory can be pinned where can_pin_memory says so.")
def pinned_memory(subject: Subject, case: Case) -> None:
    """A pinned tensor is made, and copied to the device without blocking. Where the answer is no, nothing is done."""
    del case
    if not subject.runtime.can_pin_memory():
        raise Inapplicable("can_pin_memory is False")
    try:
        tensor = torch.arange(1000).pin_memory()
    except RuntimeError as error:
        raise Broken("can_pin_memory says yes, and pinning raises.", f"{error}") from error
    copy = tensor.to(subject.device, non_blocking=True)
    subject.runtime.synchronize()
    if not tensor.is_pinned() or not torch.equal(copy.cpu(), tensor):
        raise Broken("A pinned tensor does not say so, or arrives otherwise on the device.")
