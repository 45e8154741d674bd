"""The processor as a platform."""

from __future__ import annotations

import mmap
import os

import pytest
import torch

from anytron.base.errors import EngineError
from anytron.device.platform import Availability
from anytron_cpu import CpuPlatform


@pytest.fixture
def runtime():
    return CpuPlatform().runtime()


def test_it_is_always_usable_and_no_accelerator():
    platform = CpuPlatform()
    assert platform.probe().availability is Availability.USABLE
    assert not platform.accelerator
    assert (platform.redirects_torch_cuda, platform.portable_modules) == (True, True)
    assert (platform.visible_devices_variable, platform.ray_resource) == (None, None)


def test_the_runtime_is_one_object(runtime):
    assert CpuPlatform().runtime() is runtime


def test_the_device_is_that_of_plain_tensors(runtime):
    runtime.set_device(3)
    assert runtime.current_device() == torch.zeros(1).device
    assert runtime.device_count() == 1
    with pytest.raises(EngineError, match="negative"):
        runtime.set_device(-1)


def test_the_generator_is_torch_s_own_and_its_state_round_trips(runtime):
    runtime.manual_seed(5)
    state = runtime.get_rng_state()
    first = torch.rand(4)
    runtime.set_rng_state(state)
    assert torch.equal(torch.rand(4), first)
    runtime.manual_seed(5)
    assert torch.equal(torch.rand(4, generator=runtime.default_generator()), first)
    assert state.dtype is torch.uint8


def test_memory_is_resident_memory(runtime):
    size = 64 << 20
    before = runtime.memory_stats()
    # A mapping of its own: the C library could take a tensor's memory from what was freed before, which is resident.
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        block[:: mmap.PAGESIZE] = b"1" * (size // mmap.PAGESIZE)
        after = runtime.memory_stats()
    assert after.allocated - before.allocated >= 0.9 * size
    assert after.peak_allocated >= after.allocated
    assert after.total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_eight_bit_floats_are_not_supported(runtime):
    assert runtime.supports_dtype(torch.bfloat16)
    assert runtime.supports_dtype(torch.int8)
    assert not runtime.supports_dtype(torch.float8_e4m3fn)
