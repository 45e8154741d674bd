"""The CUDA probe tells apart torch without CUDA, no GPU, an unusable GPU, usable."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from anytron.platform import Availability, Probe

PLUGIN = Path(__file__).parents[3] / "plugins" / "cuda"


@pytest.fixture
def platform(monkeypatch):
    monkeypatch.syspath_prepend(PLUGIN)
    from anytron_cuda import CudaPlatform

    yield CudaPlatform()
    for name in [name for name in sys.modules if name.partition(".")[0] == "anytron_cuda"]:
        del sys.modules[name]


def probe(platform, monkeypatch, tmp_path, *, driver: bool, cuda: str | None) -> Probe:
    """Probe with or without a driver's file, and with a torch built for ``cuda``."""
    present = tmp_path / "version"
    present.touch()
    files = (present,) if driver else (tmp_path / "missing",)
    monkeypatch.setattr("anytron_cuda.platform.DRIVER_FILES", files)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    return platform.probe()


@pytest.mark.parametrize(("driver", "expected"), [(False, Availability.ABSENT), (True, Availability.BROKEN)])
def test_torch_without_cuda(platform, monkeypatch, tmp_path, driver, expected):
    found = probe(platform, monkeypatch, tmp_path, driver=driver, cuda=None)
    assert found.availability is expected
    assert "is built without CUDA" in found.reason
    assert "pytorch.org" in found.remedy


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a GPU")
@pytest.mark.parametrize(("driver", "expected"), [(False, Availability.ABSENT), (True, Availability.BROKEN)])
def test_no_gpu(platform, monkeypatch, tmp_path, driver, expected):
    found = probe(platform, monkeypatch, tmp_path, driver=driver, cuda="12.6")
    assert found.availability is expected
    assert "finds no GPU" in found.reason
    assert "nvidia-smi" in found.remedy


def test_it_is_megatron_as_its_authors_run_it(platform):
    assert (platform.accelerator, platform.redirects_torch_cuda, platform.portable_modules) == (True, False, False)
    assert (platform.visible_devices_variable, platform.ray_resource) == ("CUDA_VISIBLE_DEVICES", "GPU")
    assert [need.package for need in platform.requirements()] == ["transformer-engine"]


def test_vllm_records_graphs_and_leaves_memory_to_a_training_rank(platform):
    from anytron_vllm.options import VllmOptions

    options = platform.rollout_options("vllm")
    assert VllmOptions.model_validate(options).enforce_eager is False
    assert options["gpu_memory_utilization"] == 0.5
    assert platform.rollout_options("transformers") == {}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU")
def test_the_runtime_is_torch_cuda(platform):
    assert platform.probe().availability is Availability.USABLE
    runtime = platform.runtime()
    runtime.set_device(0)
    block = torch.ones(2**20, device=runtime.current_device())
    assert runtime.memory_stats().allocated >= block.numel() * 4
    runtime.manual_seed(3)
    state = runtime.get_rng_state()
    first = torch.rand(4, device=runtime.current_device())
    runtime.set_rng_state(state)
    assert torch.equal(torch.rand(4, device=runtime.current_device(), generator=runtime.default_generator()), first)
    runtime.synchronize()
