"""A runtime whose functions are torch's: of the device's own module first, then torch.accelerator's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from anytron.base.errors import PlatformError
from anytron.device.runtime import AcceleratorRuntime, MemoryStats

OF_CUDA = {
    "device_count": lambda: 3,
    "current_device": lambda: 1,
    "set_device": lambda index: None,
    "synchronize": lambda: None,
    "memory_allocated": lambda: 4,
    "max_memory_allocated": lambda: 9,
    "memory_reserved": lambda: 12,
    "get_device_properties": lambda index: SimpleNamespace(total_memory=80 + index),
    "get_device_name": lambda index: f"Chip {index}",
    "default_generators": ["the first", "the second"],
}


class Chip(AcceleratorRuntime):
    device_type = "chip"
    communication_backend = "gloo"


@pytest.fixture
def torch_with(monkeypatch):
    """Make a torch whose accelerator has the given type and functions, and whose module ``torch.chip`` has others."""

    def make(kind, functions, module):
        accelerator = SimpleNamespace(current_accelerator=lambda: kind and SimpleNamespace(type=kind), **functions)
        monkeypatch.setattr(torch, "accelerator", accelerator)
        monkeypatch.setattr(torch, "get_device_module", lambda kind: SimpleNamespace(**module))
        real = torch.device
        monkeypatch.setattr(torch, "device", lambda kind, index: real("cuda" if kind == "chip" else kind, index))
        return Chip()

    return make


def test_functions_of_the_accelerator_are_the_second_choice(torch_with):
    called = []
    functions = {
        "device_count": lambda: 7,
        "current_device_index": lambda: 5,
        "set_device_index": called.append,
        "synchronize": lambda: called.append("wait"),
        "current_stream": lambda: "a stream",
        "empty_cache": lambda: called.append("emptied"),
        "memory_allocated": lambda: 1,
        "max_memory_allocated": lambda: 2,
        "memory_reserved": lambda: 3,
        "reset_peak_memory_stats": lambda: called.append("reset"),
        "get_memory_info": lambda: (50, 64),
    }
    chip = torch_with("chip", functions, {"manual_seed_all": called.append})
    assert (chip.device_count(), chip.current_device().index, chip.device_name()) == (7, 5, "chip")
    assert chip.memory_stats() == MemoryStats(allocated=1, peak_allocated=2, reserved=3, total=64)
    assert (chip.current_stream(), chip.default_generator()) == ("a stream", None)
    chip.set_device(2)
    chip.synchronize()
    chip.empty_cache()
    chip.reset_peak_memory_stats()
    chip.manual_seed(11)
    assert called == [2, "wait", "emptied", "reset", 11]


@pytest.mark.parametrize("kind", ["chip", "another", None])
def test_functions_of_the_devices_own_module_come_first(kind, torch_with):
    called = []
    own = {
        "empty_cache": lambda: called.append("emptied"),
        "reset_peak_memory_stats": lambda: called.append("reset"),
        "init": lambda: called.append("initialised"),
        "Stream": lambda: "a new stream",
        "current_stream": lambda: "the current stream",
    }
    wrong = {"device_count": lambda: 99, "current_device_index": lambda: 99, "memory_allocated": lambda: 99}
    chip = torch_with(kind, wrong, OF_CUDA | own)
    assert (chip.device_count(), chip.current_device().index, chip.device_name()) == (3, 1, "Chip 1")
    assert chip.memory_stats() == MemoryStats(allocated=4, peak_allocated=9, reserved=12, total=81)
    assert (chip.new_stream(), chip.current_stream()) == ("a new stream", "the current stream")
    chip.empty_cache()
    chip.reset_peak_memory_stats()
    assert chip.default_generator() == "the second"
    assert called == ["emptied", "reset", "initialised"]


def test_the_accelerator_of_another_type_is_not_asked(torch_with):
    chip = torch_with("another", {"device_count": lambda: 99, "memory_allocated": lambda: 99}, {})
    assert chip._ask("memory_allocated") is None
    with pytest.raises(PlatformError, match="no function device_count"):
        chip.device_count()


def test_a_torch_that_raises_where_there_is_no_accelerator(torch_with):
    chip = torch_with("chip", {}, OF_CUDA)
    torch.accelerator.current_accelerator = refuses
    assert chip.device_count() == 3


def refuses(*_):
    raise RuntimeError("Allocator for chip is not a DeviceAllocator.")


def has_none(*_):
    raise NotImplementedError("getMemoryInfo is not implemented for this allocator yet.")


def fails(*_):
    raise RuntimeError("chip error: an instruction was illegal")


def test_memory_that_torch_cannot_tell_is_unknown(torch_with):
    functions = dict.fromkeys(
        ("memory_allocated", "max_memory_allocated", "memory_reserved", "empty_cache", "reset_peak_memory_stats"),
        refuses,
    )
    chip = torch_with("chip", {"current_device_index": lambda: 0, "get_memory_info": has_none, **functions}, {})
    assert chip.memory_stats() == MemoryStats(None, None, None, None)
    chip.empty_cache()
    chip.reset_peak_memory_stats()


def test_an_error_of_the_device_is_not_an_unknown_figure(torch_with):
    chip = torch_with("chip", {"memory_allocated": fails}, {})
    with pytest.raises(RuntimeError, match="illegal"):
        chip.memory_stats()


def test_a_function_that_torch_has_nowhere_is_named(torch_with):
    chip = torch_with("chip", {}, {})
    with pytest.raises(PlatformError) as raised:
        chip.set_device(1)
    assert "neither torch.chip.set_device nor torch.accelerator.set_device_index can be called" in str(raised.value)


def test_a_device_without_a_module_in_torch_is_named():
    with pytest.raises(PlatformError, match=r"torch has no module torch\.chip"):
        Chip()
