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
    Fault("waits-ignored", "streams-order-work", "A stream did not wait for the other stream"),
    Fault("events-pass-early", "streams-order-work", "A stream did not wait for the other stream"),
    Fault("synchronize-does-not-wait", "synchronize-waits", "A copy to the host is incomplete after synchronize"),
    Fault("copies-do-not-wait", "tensors-stay", "The result differs from the processor's"),
    Fault("record-stream-ignored", "streams-order-work", "Memory was used again while another stream still read it"),
    Fault("seed-ignored", "seeds-decide", "The same seed drew other numbers"),
    Fault("state-ignored", "rng-round-trip", "After a state is set, reading it gives a different state"),
    Fault("host-generator", "seeds-decide", "The same seed drew other numbers"),
    Fault("plain-out-of-memory", "out-of-memory", "is_out_of_memory does not recognize the error"),
    Fault("freed-memory-counts", "memory-figures", "allocated does not shrink when a tensor is freed"),
    Fault("peak-stays", "peak-memory", "reset_peak_memory_stats does not reset the peak"),
    Fault("set-device-ignored", "ranks-own-devices", "A rank's tensors are on another rank's device"),
    Fault("marks-lost", "parameters-keep-marks", "lost: sequence_parallel"),
    Fault("operators-on-the-host", "own-operators", "_softmax (1)"),
    Fault("results-on-the-host", "tensors-stay", "index_add_"),
    Fault("cumsum-starts-late", "tensors-stay", "case: cumsum"),
    Fault("products-of-few-bits", "dtypes-compute", "The product is wrong"),
    Fault("softmax-forgets-keys", "attention-packed", "attention_kernel of 'neutral-default'"),
    Fault("no-masked-assignment", "attention-context-parallel", "by a mask has no kernel"),
)
