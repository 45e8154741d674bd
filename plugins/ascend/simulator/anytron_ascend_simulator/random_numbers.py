"""Random operators draw from the device's generator: a seed and an offset, as on the device.

Each operator runs with a host generator that is seeded by both, and advances the offset. The numbers are
not those of an NPU; but the same seed repeats them, a saved state restores them, and the host's own generator does
not change.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

STEP = 4
"""Philox counters advance by multiples of 4 (torch's CUDA generator demands it of offsets)."""


def is_random(operator: torch._ops.OpOverload) -> bool:
    """Whether the operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def host_seed(seed: int, offset: int) -> int:
    """Return the seed for a host generator: a hash of the device generator's seed and offset."""
    return hash((seed, offset)) % 2**63


def draw(generator: torch.Generator | None) -> int:
    """Advance a device's generator (None = the current device's), and return the seed for a host generator."""
    if generator is None:
        npu: Any = torch.npu  # type: ignore[attr-defined]  # torch_npu adds it
        generator = npu.default_generators[npu.current_device()]
    offset = generator.get_offset()
    generator.set_offset(offset + STEP)
    return host_seed(generator.initial_seed(), offset)


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Let the host's default generator draw from a seed, and restore it; None = change nothing."""
    if seed is None:
        yield
        return
    host = torch.default_generator
    before = host.get_state()
    host.manual_seed(seed)
    try:
        yield
    finally:
        host.set_state(before)
