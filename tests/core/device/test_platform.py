"""Devices whose module in torch has the interface of ``torch.cuda``."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from anytron.device.runtime import MemoryStats, TorchDeviceRuntime


class Chip(TorchDeviceRuntime):
    device_type = "cpu"
    communication_backend = "gloo"


def test_a_peak_of_memory_begins_anew():
    chip, memory = Chip(), {"now": 3, "peak": 9}
    chip.module = SimpleNamespace(
        memory_allocated=lambda: memory["now"],
        max_memory_allocated=lambda: memory["peak"],
        memory_reserved=lambda: 12,
        current_device=lambda: 0,
        get_device_properties=lambda index: SimpleNamespace(total_memory=80 + index),
        reset_peak_memory_stats=lambda: memory.update(peak=memory["now"]),
    )
    assert chip.memory_stats() == MemoryStats(allocated=3, peak_allocated=9, reserved=12, total=80)
    chip.reset_peak_memory_stats()
    assert chip.memory_stats().peak_allocated == 3
    assert callable(torch.cuda.reset_peak_memory_stats)
