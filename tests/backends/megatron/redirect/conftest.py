import pytest
import torch

from anytron.device.runtime import DeviceRuntime, MemoryStats
from anytron_megatron.redirect import redirect_torch_cuda

torch.set_num_threads(1)


class HostRuntime(DeviceRuntime):
    """The processor, with distinguishable answers."""

    device_type = "cpu"
    communication_backend = "gloo"

    def __init__(self):
        self.calls = []

    def device_count(self):
        return 3

    def current_device(self):
        return torch.device("cpu")

    def set_device(self, index):
        self.calls.append(("set_device", index))

    def synchronize(self):
        self.calls.append("synchronize")

    def empty_cache(self):
        self.calls.append("empty_cache")

    def memory_stats(self):
        return MemoryStats(allocated=10, peak_allocated=30, reserved=20, total=100)

    def reset_peak_memory_stats(self):
        self.calls.append("reset_peak")

    def manual_seed(self, seed):
        torch.manual_seed(seed)  # as a runtime of the processor is naturally written

    def get_rng_state(self):
        return torch.get_rng_state()

    def set_rng_state(self, state):
        torch.set_rng_state(state)

    def default_generator(self):
        return torch.default_generator

    def compute_capability(self):
        return (7, 5)

    def supports_dtype(self, dtype):
        return dtype is not torch.bfloat16

    def device_name(self):
        return "the host"


@pytest.fixture
def runtime():
    return HostRuntime()


@pytest.fixture
def redirected(runtime):
    """The redirection, active during one test."""
    undo = redirect_torch_cuda(runtime)
    yield runtime
    undo()
