"""NVIDIA GPUs as a platform: the answers to the hooks, each computed by another module."""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, Any

from anytron import ConfigEdit, Decision, Platform, Requirement, hookimpl
from anytron_cuda import modules
from anytron_cuda.capabilities import broken_libraries
from anytron_cuda.environment import (
    VISIBLE_DEVICES,
    Needs,
    contradictions,
    has_compiler,
    needs_order,
    worker_environment,
)
from anytron_cuda.gpus import peak_flops, precision_diagnostics
from anytron_cuda.options import CudaOptions
from anytron_cuda.probe import judge, look, visible_gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pydantic import BaseModel

    from anytron import DeviceRuntime, Diagnostic, EngineFacts, Ledger, PeakFlops, Probe, ProcessInfo, RunConfig
    from anytron.kernels import AttentionKernel, AttentionSpec, KernelName, KernelSpec, LogProbKernel, LogProbSpec
    from anytron_cuda.nvml import Gpu

VLLM_OPTIONS = (
    # As vLLM by itself does. An update of weights copies into the tensors that graphs have recorded
    # (vllm/model_executor/model_loader/reload/layerwise.py).
    ConfigEdit(
        "rollout.options.enforce_eager",
        False,
        "starting the kernels of a step one by one takes longer than running them, and CUDA graphs start them together",
        default=True,
    ),
    # verl's default (its rollout.yaml).
    ConfigEdit(
        "rollout.options.gpu_memory_utilization",
        0.5,
        "vLLM's default is 0.9 of a GPU, which also holds a training rank",
        default=True,
    ),
)


class CudaPlatform(Platform):
    """The platform ``cuda``: models use Transformer Engine's modules, or portable modules with CUDA kernels."""

    name = "cuda"
    api_version = 1
    options_model = CudaOptions
    redirects_torch_cuda = False
    visible_devices_variable = VISIBLE_DEVICES
    socket_interface_variables = ("NCCL_SOCKET_IFNAME",)
    environment_prefixes = ("CUBLAS_", "CUDA_", "CUDNN_", "NCCL_", "NVTE_", "TRITON_")
    ray_resource = "GPU"

    def __init__(self) -> None:
        self._options = CudaOptions()

    @property
    def portable_modules(self) -> bool:  # type: ignore[override]
        """Whether models use portable modules: set by ``platform.options.modules``; if auto, by what is installed."""
        return self._modules(imported=False).value == modules.PORTABLE

    def configure_options(self, options: BaseModel | None) -> None:
        """Keep the options."""
        assert isinstance(options, CudaOptions)
        self._options = options

    def decisions(self) -> list[Decision]:
        """The choice of modules; in the driver, which tries imports, also the libraries that cannot be imported."""
        if _is_rank():
            return [self._modules(imported=False)]
        broken = broken_libraries().items()
        return [self._modules(imported=True), *(Decision(name, "not used", why) for name, why in broken)]

    def probe(self) -> Probe:
        """Distinguish these cases: no GPU, another vendor's GPU, an incompatible driver or torch, usable."""
        return judge(look())

    def runtime(self) -> DeviceRuntime:
        """The runtime of the GPUs of this process."""
        return _runtime()

    def peak_flops(self, dtype: str) -> PeakFlops:
        """Return ``platform.options.peak_tflops``, or else the number in NVIDIA's data sheets by the GPU's name."""
        return peak_flops(self.runtime().device_name(), dtype, self._options.peak_tflops)

    def prepare_engine(self, facts: EngineFacts, ledger: Ledger) -> None:
        """Import Transformer Engine if models use it; turn torch's deterministic mode on or off, as the run asks."""
        del ledger
        import torch

        if not self.portable_modules:
            modules.import_transformer_engine()
        torch.use_deterministic_algorithms(facts.deterministic)

    @hookimpl
    def requirements(self) -> list[Requirement]:
        """Transformer Engine: required if the options select it, optional if the platform chooses the modules."""
        wanted = self._options.modules
        if wanted == modules.PORTABLE:
            return []
        optional = wanted != modules.TRANSFORMER_ENGINE
        return [Requirement(modules.DISTRIBUTION, modules.SUPPORTED, modules.INSTALL, optional)]

    @hookimpl
    def configure(self, config: RunConfig) -> Iterator[ConfigEdit | Diagnostic]:
        """Give all ranks the same choice of modules; check the environment, and whether the GPU supports FP8."""
        chosen = self._modules(imported=True, against=_against_transformer_engine(config))
        if (chosen.value == modules.PORTABLE) != self.portable_modules:  # which is all that ranks look at
            yield ConfigEdit(modules.OPTION, chosen.value, chosen.reason)
        if config.rollout.engine == "vllm" and not config.supervised:
            yield from VLLM_OPTIONS
        gpus = self._visible_gpus()
        yield from contradictions(self._options, _needs(config, gpus), os.environ)
        if chosen.value != modules.PORTABLE:
            yield from precision_diagnostics(config, gpus)

    @hookimpl
    def runtime_env(self, process: ProcessInfo, config: RunConfig) -> dict[str, str]:
        """Set the variables of CUDA, NCCL and torch."""
        return worker_environment(self._options, _needs(config, self._visible_gpus()), process.role, os.environ)

    @hookimpl
    def attention_kernel(self, spec: AttentionSpec) -> AttentionKernel | None:
        """Return the kernel that :mod:`anytron_cuda.attention` chooses for this GPU; None for other devices."""
        if spec.device_type != "cuda" or spec.invariant:
            return None
        from anytron_cuda.attention.choice import make_attention
        from anytron_cuda.capabilities import capabilities

        return make_attention(spec, capabilities(), self._options.attention)

    @hookimpl
    def fused_kernel(self, name: KernelName, spec: KernelSpec) -> Callable[..., Any] | None:
        """Return the kernel that :mod:`anytron_cuda.kernels` chooses for this GPU; None for other devices."""
        from anytron_cuda.kernels import fused_kernel

        return fused_kernel(name, spec)

    @hookimpl
    def log_prob_kernel(self, spec: LogProbSpec) -> LogProbKernel | None:
        """Return the kernel that :mod:`anytron_cuda.log_probs` chooses for this GPU; None for other devices."""
        from anytron_cuda.log_probs import log_prob_kernel

        return log_prob_kernel(spec)

    def _visible_gpus(self) -> tuple[Gpu, ...]:
        return visible_gpus(self._options.visible_devices or os.environ.get(VISIBLE_DEVICES))

    def _modules(self, *, imported: bool, against: str = "") -> Decision:
        wanted = self._options.modules
        library = modules.transformer_engine(imported=imported and wanted != modules.PORTABLE)
        return modules.choose_modules(wanted, library, against=against)


def _needs(config: RunConfig, gpus: Iterable[Gpu]) -> Needs:
    """Find the properties of a run on which its environment variables depend."""
    sizes = config.parallel.sizes()
    capability = min((gpu.compute_capability for gpu in gpus), default=None)
    return Needs(
        deterministic=config.engine.repeatable,
        in_order=needs_order(sizes.tensor, sizes.context, capability),
        compiler=has_compiler(os.environ),
        ranks=config.parallel.world_size,
    )


def _against_transformer_engine(config: RunConfig) -> str:
    """Why this run needs the portable modules; empty if it does not."""
    if config.engine.on_policy == "bitwise":
        return "engine.on_policy=bitwise needs kernels whose rows do not depend on their company"
    if config.rollout.engine == "megatron":
        return "rollout.engine=megatron generates with the portable modules"
    if config.model.dtype == "float32":
        # cublaslt_gemm.cu; dot_product_attention/utils.py of 2.0 to 2.9: no backend for float32 and thd.
        return "Transformer Engine multiplies float32 in TF32, and has no attention for packed float32 sequences"
    return ""


def _is_rank() -> bool:
    """Whether this process is a training rank: it has joined a process group, and imports its libraries by itself."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


@functools.cache
def _runtime() -> DeviceRuntime:
    from anytron_cuda.runtime import CudaRuntime

    return CudaRuntime()
