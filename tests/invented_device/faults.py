"""Faults of the invented accelerator, each with the rule of the conformance kit that must notice it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One thing that a device or its driver does wrongly.

    Attributes:
        name: The name by which the device knows it (INVENTED_FAULT, ``torch.ops.invented.set_fault``).
        rule: The rule that must fail.
        says: A part of the failure's text.
    """

    name: str
    rule: str
    says: str


FAULTS = (
    Fault("waits-ignored", "streams-order-work", ""),
    Fault("events-pass-early", "streams-order-work", ""),
    Fault("synchronize-does-not-wait", "synchronize-waits", ""),
    Fault("copies-do-not-wait", "tensors-stay", ""),
    Fault("record-stream-ignored", "streams-order-work", ""),
    Fault("seed-ignored", "seeds-decide", ""),
    Fault("state-ignored", "rng-round-trip", ""),
    Fault("host-generator", "seeds-decide", ""),
    Fault("plain-out-of-memory", "out-of-memory", ""),
    Fault("freed-memory-counts", "memory-figures", ""),
    Fault("peak-stays", "peak-memory", ""),
    Fault("set-device-ignored", "ranks-own-devices", ""),
    Fault("results-on-the-host", "tensors-stay", ""),
    Fault("cumsum-starts-late", "tensors-stay", ""),
    Fault("products-of-few-bits", "dtypes-compute", ""),
    Fault("softmax-forgets-keys", "attention-packed", ""),
    Fault("no-masked-assignment", "attention-context-parallel", ""),
)
