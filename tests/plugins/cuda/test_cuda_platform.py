"""The CUDA platform puts its rooms together: probe, modules, environment, number formats."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from packaging.version import Version

from anytron.base.errors import ConfigError
from anytron.config.schema import default_run
from anytron.device.hooks.types import ConfigEdit, ProcessInfo
from anytron.device.loading import hooks_of
from anytron.device.patches import Ledger
from anytron.device.platform import Availability, EngineFacts, decisions_of
from anytron.run.preflight.limits import limit_diagnostics
from tests.recipes import recipes


@pytest.fixture
def platform(plugin):
    from anytron_cuda import CudaPlatform

    return CudaPlatform()


@pytest.fixture
def configured(platform):
    """The platform with options, and what it says of a run."""

    def configured(options=None, **sections):
        platform.configure_options(platform.options_model.model_validate(options or {}))
        return list(platform.configure(default_run(sections)))

    return configured


@pytest.fixture
def gpus(monkeypatch, platform):
    """Let NVML answer with GPUs of these compute capabilities."""
    from anytron_cuda import probe
    from anytron_cuda.nvml import Driver, Gpu

    def gpus(*capabilities):
        found = tuple(Gpu("NVIDIA X", f"GPU-{index}", each) for index, each in enumerate(capabilities))
        monkeypatch.setattr(probe, "_driver", lambda: (Driver("570.86.15", (12, 8), found), ""))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return gpus


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a GPU")
@pytest.mark.parametrize(("driver", "expected"), [(False, Availability.ABSENT), (True, Availability.BROKEN)])
@pytest.mark.parametrize(("cuda", "reason"), [(None, "is built without CUDA"), ("12.6", "finds no GPU")])
def test_the_facts_are_those_of_this_machine(platform, monkeypatch, tmp_path, driver, expected, cuda, reason):
    from anytron_cuda import probe

    present = tmp_path / "version"
    present.touch()
    monkeypatch.setattr(probe, "DRIVER_FILES", (present,) if driver else (tmp_path / "missing",))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    found = platform.probe()
    assert found.availability is expected
    assert reason in found.reason


def test_torch_cuda_is_the_device(platform):
    assert (platform.accelerator, platform.redirects_torch_cuda) == (True, False)
    assert (platform.visible_devices_variable, platform.ray_resource) == ("CUDA_VISIBLE_DEVICES", "GPU")


def test_without_transformer_engine_modules_are_portable_and_it_is_wished_for(platform):
    assert platform.portable_modules
    decision, *_ = decisions_of(platform)
    assert str(decision) == "modules: portable (Transformer Engine is not installed)"
    (wish,) = platform.requirements()
    assert (wish.package, wish.optional) == ("transformer-engine", True)


def test_transformer_engine_is_needed_if_it_is_named_and_not_asked_for_if_it_is_not_wanted(platform, configured):
    with pytest.raises(ConfigError, match="Transformer Engine is not installed"):
        configured({"modules": "transformer_engine"})
    (need,) = platform.requirements()
    assert not need.optional
    assert configured({"modules": "portable"}) == []
    assert platform.requirements() == []


@pytest.fixture
def transformer_engine(monkeypatch, platform):
    """Let Transformer Engine be installed, its import failing as told."""
    from anytron_cuda import modules

    def transformer_engine(broken=""):
        def found(*, imported):
            return modules.Library(Version("2.9.0"), broken if imported else "")

        monkeypatch.setattr(modules, "transformer_engine", found)

    return transformer_engine


def test_what_the_driver_found_broken_ranks_do_not_try_again(platform, configured, transformer_engine):
    transformer_engine(broken="undefined symbol")
    (edit,) = configured()
    assert (edit.key, edit.value) == ("platform.options.modules", "portable")
    assert "cannot be imported: undefined symbol" in edit.reason
    assert configured({"modules": "portable"}) == []


def test_a_library_that_was_built_for_another_torch_is_not_used_and_the_run_says_so(platform, tmp_path, monkeypatch):
    (tmp_path / "flash_attn.py").write_text("raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c10')")
    (tmp_path / "triton.py").touch()
    for name, version in (("flash_attn", "2.8.3"), ("triton", "3.5.0")):
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    _, *libraries = map(str, decisions_of(platform))
    assert libraries == ["flash-attn: not used (ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c10)"]


@pytest.mark.parametrize(
    ("needing", "reason"),
    [
        ({"rollout": {"engine": "megatron"}}, "rollout.engine=megatron generates with the portable modules"),
        ({"model": {"path": "x", "dtype": "float32"}}, "Transformer Engine multiplies float32 in TF32"),
    ],
)
def test_a_run_that_needs_the_portable_modules_gets_them_unless_others_are_named(
    platform, configured, transformer_engine, needing, reason
):
    transformer_engine()
    (edit,) = configured(**needing)
    assert (edit.key, edit.value) == ("platform.options.modules", "portable")
    assert reason in edit.reason
    assert not platform.portable_modules, "of a run it remembers nothing"
    assert configured({"modules": "transformer_engine"}, **needing) == []
    assert not platform.portable_modules, "which is for the engine's own checks to refuse"


def test_fp8_is_checked_against_the_gpu_where_transformer_engine_computes(configured, transformer_engine, gpus):
    fp8 = {"engine": {"options": {"transformer": {"fp8": "hybrid"}}}}
    transformer_engine()
    gpus((9, 0))
    assert configured(**fp8) == []
    gpus((9, 0), (8, 0))
    (found,) = configured(**fp8)
    assert (found.severity, found.key) == ("error", "engine.options.transformer.fp8")
    assert configured({"visible_devices": "0"}, **fp8) == [], "the other one is hidden"


def test_the_environment_follows_from_the_run_and_the_gpu(platform, gpus):
    trainer, rollout = ProcessInfo("trainer"), ProcessInfo("rollout")
    split = {"parallel": {"tensor_model_parallel_size": 2}}
    deterministic = default_run({**split, "engine": {"deterministic": True}})
    gpus((9, 0))
    environment = platform.runtime_env(trainer, deterministic)
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    of_rollout = platform.runtime_env(rollout, deterministic).keys()
    assert of_rollout == {"CUDA_DEVICE_ORDER", "TORCH_CUDNN_SDPA_DEPRIORITIZED"}
    gpus((10, 0))
    assert platform.runtime_env(trainer, default_run(split)).keys() == {*of_rollout, "PYTORCH_CUDA_ALLOC_CONF"}


def test_a_contradiction_of_the_users_environment_is_found(configured, monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "NVLS")
    (found,) = configured(engine={"deterministic": True})
    assert (found.severity, found.key) == ("error", "engine.deterministic")


@pytest.mark.parametrize("recipe", recipes("GPUs"), ids=str)
def test_a_recipe_for_gpus_is_accepted(recipe, platform, gpus):
    gpus(*[(9, 0)] * 8)
    run = recipe.run()
    platform.configure_options(platform.options_model.model_validate(run.platform.options))
    needed = [one for one in platform.configure(run) if not (isinstance(one, ConfigEdit) and one.default)]
    assert [*needed, *limit_diagnostics(run, platform)] == []


def test_torch_refuses_what_is_not_deterministic_in_a_deterministic_run(platform):
    try:
        platform.prepare_engine(EngineFacts(deterministic=True), Ledger(context=None))
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_vllm_records_graphs_and_leaves_memory_to_a_training_rank(platform):
    from anytron_vllm.options import VllmOptions

    hooks = hooks_of(platform)
    options = hooks.configure(default_run({"rollout": {"engine": "vllm"}}))[0].rollout.options
    assert VllmOptions.model_validate(options).enforce_eager is False
    assert options["gpu_memory_utilization"] == 0.5
    assert hooks.configure(default_run())[0].rollout.options == {}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("NCCL error: unhandled cuda error ... Cuda failure 'out of memory'"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
)
def test_what_says_that_a_gpu_has_no_memory_left(platform, error, expected):
    assert platform.runtime().is_out_of_memory(error) is expected


NOT_INITIALISED = """
import torch
from anytron.config.schema import default_run
from anytron_cuda import CudaPlatform

platform = CudaPlatform()
assert platform.probe().availability.value == "usable"
list(platform.configure(default_run()))
platform.decisions()
assert not torch.cuda.is_initialized()
"""


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU")
def test_neither_the_probe_nor_the_checks_of_a_run_initialise_cuda(plugin):
    environment = {**os.environ, "PYTHONPATH": str(plugin)}
    done = subprocess.run(
        [sys.executable, "-c", NOT_INITIALISED], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


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
