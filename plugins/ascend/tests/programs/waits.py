"""Cases with and without a wait on one simulated NPU: what each reads, as JSON; then rules of the kit, with faults."""

import contextlib
import json
import sys
from pathlib import Path
from unittest import mock

from anytron_conformance.rules import rules_of
from anytron_conformance.subject import Source, Subject
from anytron_conformance.worker import check_rule

source = Source("ascend")
session = source.open()
session.platform.runtime()

import torch  # noqa: E402
import torch_npu  # noqa: E402

side, current = torch.npu.Stream(), torch.npu.current_stream()


def a_side_stream_reads(wait):
    numbers = torch.zeros(3, device="npu")
    torch.npu.synchronize()
    numbers.add_(1)
    if wait:
        side.wait_stream(current)
    with torch.npu.stream(side):
        found = numbers * 1
    side.synchronize()
    return found


def the_current_stream_reads(wait):
    numbers = torch.zeros(3, device="npu")
    torch.npu.synchronize()
    with torch.npu.stream(side):
        numbers.add_(1)
    if wait:
        current.wait_stream(side)
    return numbers * 1


def an_event_is_recorded_too_early(wait):
    numbers, event = torch.zeros(3, device="npu"), torch.npu.Event()
    torch.npu.synchronize()
    with torch.npu.stream(side):
        event.record()
        numbers.add_(1)
        if wait:
            event.record()
    current.wait_event(event)
    return numbers * 1


def a_kernel_of_cann(wait):
    numbers = torch.zeros(1, 6, device="npu")
    torch.npu.synchronize()
    with torch.npu.stream(side):
        numbers.fill_(1)
    if wait:
        current.wait_stream(side)
    return torch_npu.npu_swiglu(numbers)[0] / torch.nn.functional.silu(torch.ones(3, device="npu"))


def the_host_reads_a_copy(wait):
    pinned = torch.zeros(3).pin_memory()
    pinned.copy_(torch.ones(3, device="npu"), non_blocking=True)
    if wait:
        torch.npu.synchronize()
    return pinned.clone()


def the_host_overwrites_what_is_copied(wait):
    pinned = torch.ones(3).pin_memory()
    copied = pinned.to("npu", non_blocking=True)
    if wait:
        torch.npu.synchronize()
    pinned.fill_(7)
    return copied


def freed_memory_is_used_again(wait):
    length = 1 << 20
    numbers = torch.full((length,), 1.0, device="npu")
    side.wait_stream(current)
    with torch.npu.stream(side):
        found = numbers * 1
    if wait:
        numbers.record_stream(side)
    del numbers
    float(torch.full((length,), 7.0, device="npu").sum())
    side.synchronize()
    return found[:3]


CASES = (
    a_side_stream_reads,
    the_current_stream_reads,
    an_event_is_recorded_too_early,
    a_kernel_of_cann,
    the_host_reads_a_copy,
    the_host_overwrites_what_is_copied,
    freed_memory_is_used_again,
)
for case in CASES:
    found = []
    for wait in (False, True):
        found.append(case(wait).tolist())
        torch.npu.synchronize()
    print(json.dumps({"case": case.__name__, "without": found[0], "with": found[1]}), flush=True)

side.synchronize()
wrong = torch.ones(3, device="npu").gather(0, torch.tensor([5], device="npu"))
try:
    print(wrong.tolist())
except RuntimeError as error:
    print(json.dumps({"case": "an index that does not exist", "says": str(error)}), flush=True)

rules = {rule.title: rule for rule in rules_of("device")}
STREAM, RUNTIME = torch.npu.Stream, type(session.platform.runtime())
# Faults come first: later the old bytes could be those of the rule's last check, which are right.
FAULTS = (
    ("streams-order-work", (mock.patch.object(STREAM, "wait_stream"), mock.patch.object(STREAM, "wait_event"))),
    ("streams-order-work", (mock.patch.object(torch.Tensor, "record_stream"),)),
    ("synchronize-waits", (mock.patch.object(RUNTIME, "synchronize"),)),
    ("streams-order-work", ()),
    ("synchronize-waits", ()),
)
for name, faults in FAULTS:
    subject = Subject(source, session, Path(sys.argv[1]))
    with contextlib.ExitStack() as patched:
        for fault in faults:
            patched.enter_context(fault)
        result = check_rule(rules[name], subject)
    torch.npu.synchronize()
    print(json.dumps({"rule": name, "status": result.status, "says": result.explanation or result.detail}), flush=True)
