"""NVIDIA GPUs as a platform."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytron import Platform, hookimpl
from anytron.hooks.types import Requirement
from anytron.platform import Availability, Probe

if TYPE_CHECKING:
    from collections.abc import Callable

    from anytron.kernels.contract import AttentionKernel, AttentionSpec, KernelName, KernelSpec
    from anytron.platform import DeviceRuntime

# The kernel driver's interface, and the GPU of Windows' Linux subsystem.
DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/dev/dxg"))
VLLM_OPTIONS: dict[str, Any] = {
    # To start the kernels of a step one by one takes longer than they do: graphs, as vLLM by itself does. An update of
    # weights copies into the tensors that graphs have recorded (vllm/model_executor/model_loader/reload/layerwise.py).
    "enforce_eager": False,
    # vLLM would take 0.9 of a device, on which a training rank lives too. verl's default (its rollout.yaml).
    "gpu_memory_utilization": 0.5,
}


class CudaPlatform(Platform):
    """Megatron as its authors run it: ``torch.cuda`` is the device, Transformer Engine computes."""

    name = "cuda"
    redirects_torch_cuda = False
    portable_modules = False
    visible_devices_variable = "CUDA_VISIBLE_DEVICES"
    socket_interface_variables = ("NCCL_SOCKET_IFNAME",)
    environment_prefixes = ("CUBLAS_", "CUDA_", "CUDNN_", "NCCL_", "NVTE_")
    ray_resource = "GPU"

    def probe(self) -> Probe:
        """Tell apart: torch without CUDA, no GPU, a GPU that torch cannot use, usable."""
        driver = any(path.exists() for path in DRIVER_FILES)
        missing = Availability.BROKEN if driver else Availability.ABSENT
        seen = "an NVIDIA driver is running" if driver else "no NVIDIA driver is running"
        try:
            import torch
        except (ImportError, OSError) as error:
            # OSError: a shared library of the CUDA build is missing.
            return Probe(Availability.BROKEN, f"torch cannot be imported: {error}", "reinstall torch")
        if torch.version.cuda is None:
            return Probe(
                missing,
                f"torch {torch.__version__} is built without CUDA, and {seen}",
                "install a torch built with CUDA (see pytorch.org), or name another platform",
            )
        # Counts through NVML where it can: does not create a CUDA context, so that the process may still fork.
        devices = torch.cuda.device_count()
        if devices == 0:
            return Probe(
                missing,
                f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU, and {seen}",
                "check nvidia-smi, CUDA_VISIBLE_DEVICES and that the driver is new enough for this CUDA",
            )
        return Probe(Availability.USABLE, f"{devices} GPU(s), CUDA {torch.version.cuda}", devices=devices)

    def runtime(self) -> DeviceRuntime:
        """The GPUs of this process."""
        return _runtime()

    @hookimpl
    def requirements(self) -> list[Requirement]:
        """Megatron's modules on CUDA are Transformer Engine's."""
        return [
            Requirement("transformer-engine", ">=2.0", "pip install --no-build-isolation 'transformer_engine[pytorch]'")
        ]

    @hookimpl
    def rollout_options(self, engine: str) -> dict[str, Any]:
        """Let vLLM record graphs, and leave memory to a training rank."""
        return dict(VLLM_OPTIONS) if engine == "vllm" else {}

    @hookimpl
    def attention_kernel(self, spec: AttentionSpec) -> AttentionKernel | None:
        """What :mod:`anytron_cuda.attention` chooses for this GPU."""
        if spec.device_type != "cuda":
            return None
        from anytron_cuda.attention.kernel import make_attention
        from anytron_cuda.capabilities import capabilities

        return make_attention(spec, capabilities())

    @hookimpl
    def fused_kernel(self, name: KernelName, spec: KernelSpec) -> Callable[..., Any] | None:
        """What :mod:`anytron_cuda.kernels` chooses."""
        from anytron_cuda.kernels import fused_kernel

        return fused_kernel(name, spec)


@functools.cache
def _runtime() -> DeviceRuntime:
    from anytron_cuda.runtime import CudaRuntime

    return CudaRuntime()
