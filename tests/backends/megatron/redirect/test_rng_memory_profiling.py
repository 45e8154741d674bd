from contextlib import contextmanager

import pytest
import torch

from anytron.base.errors import EngineError
from anytron.device.runtime import MemoryStats

pytestmark = pytest.mark.usefixtures("redirected")


def test_state_and_seed_are_the_runtimes_generators():
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3, device="cuda")
    torch.cuda.random.set_rng_state(state, device="cuda:0")
    assert torch.equal(torch.rand(3), first)
    assert torch.cuda.initial_seed() == 5


def test_seeding_torch_seeds_the_device_without_recursion():
    torch.manual_seed(7)
    first = torch.rand(3, device="cuda")
    torch.cuda.manual_seed_all(7)
    assert torch.equal(torch.rand(3, device="cuda"), first)


def test_default_generators_can_be_indexed():
    assert torch.cuda.default_generators[torch.cuda.current_device()] is torch.default_generator
    assert len(torch.cuda.default_generators) == 3


def test_generators_are_made_on_the_runtimes_device_and_recognised():
    generator = torch.Generator(device="cuda")
    assert generator.device.type == "cpu"
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert torch.rand(2, generator=generator, device="cuda").shape == (2,)
    assert hasattr(torch.Generator, "get_state")


def test_fork_rng_restores_the_state():
    before = torch.cuda.get_rng_state()
    with torch.random.fork_rng(devices=[0]):
        torch.rand(3)
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_memory_is_what_the_runtime_counts(redirected):
    assert torch.cuda.memory_allocated() == torch.cuda.memory.memory_allocated("cuda") == 10
    assert torch.cuda.max_memory_allocated() == 30
    assert torch.cuda.memory_reserved() == 20
    assert torch.cuda.mem_get_info() == (80, 100)
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 30
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert redirected.calls == ["empty_cache", "reset_peak"]


def test_nvtx_ranges_nest_in_the_runtimes_profiler(runtime, request):
    log = []

    class Profiled(type(runtime)):
        @contextmanager
        def profiler_range(self, name):
            log.append(name)
            yield
            log.append("end " + name)

    request.getfixturevalue("redirected")  # active; a second one is for this test only
    from anytron_megatron.redirect import streams
    from anytron_megatron.redirect.substitution import substitute

    undo = substitute(streams.substitutions(Profiled()))
    torch.cuda.nvtx.range_push("a")
    with torch.cuda.nvtx.range("b"):
        torch.cuda.nvtx.mark("now")
    torch.cuda.nvtx.range_pop()
    undo()
    assert log == ["a", "b", "now", "end now", "end b", "end a"]


def test_memory_that_torch_cannot_tell(redirected, monkeypatch):
    monkeypatch.setattr(redirected, "memory_stats", lambda: MemoryStats(None, None, None, None))
    assert set(torch.cuda.memory_stats().values()) == {0}
    for reads in (torch.cuda.mem_get_info, lambda: torch.cuda.get_device_properties(0).total_memory):
        with pytest.raises(EngineError, match=r"size of the device's memory is unknown"):
            reads()


def test_the_runtime_stands_in_for_a_generator_that_torch_cannot_reach(redirected, monkeypatch):
    monkeypatch.setattr(redirected, "default_generator", lambda: None)
    torch.cuda.manual_seed(5)  # the runtime seeds by torch.manual_seed, which calls this function again
    state = torch.cuda.default_generators[0].get_state()
    first = torch.rand(3, device="cuda")
    torch.cuda.default_generators[0].set_state(state)  # as Megatron's tracker does
    assert torch.equal(torch.rand(3), first)
    torch.cuda.seed()
    assert not torch.equal(torch.rand(3), first)
    with pytest.raises(EngineError, match=r"seed of the device's random number generator is unknown"):
        torch.cuda.initial_seed()
