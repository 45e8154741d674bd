"""Environment variables of CUDA, cuBLAS, NCCL and torch, and conflicting variables in the user's own environment.

docs/how-to/train-on-nvidia-gpus.md has the table, with the variables that are left alone.
"""

from __future__ import annotations

import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from anytron import Diagnostic

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anytron import Role
    from anytron_cuda.options import CudaOptions

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
"""Read by every version of torch, before the variable's other name :data:`ALLOCATOR_TOO`
(c10/cuda/CUDAAllocatorConfig.h); vLLM reads this name."""
ALLOCATOR_TOO = "PYTORCH_ALLOC_CONF"
EXPANDABLE = "expandable_segments:True"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
DETERMINISTIC = {
    # cuBLAS is deterministic with a workspace of fixed size only (torch.use_deterministic_algorithms refuses others).
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    # Sums by switches (NVLink SHARP) have no fixed order; what Megatron-LM's --deterministic-mode asserts.
    "NCCL_ALGO": ("^NVLS", "Ring", "Tree", "CollnetDirect", "CollnetChain"),
}
"""Variables of deterministic runs, each with the values that it may have; Anytron sets the first."""
WITHOUT_COMPILER = "TORCHDYNAMO_DISABLE"
CUDNN_LAST = "TORCH_CUDNN_SDPA_DEPRIORITIZED"
"""Read by torch 2.10 and later, which would otherwise prefer cuDNN's attention on Hopper and Blackwell. cuDNN plans
anew for each shape, hence for each token that Hugging Face's models generate; with masks its gradients can be NaN
(pytorch #196678)."""


@dataclass(frozen=True)
class Needs:
    """The properties of a run, besides ``platform.options``, on which environment variables depend.

    Attributes:
        deterministic: ``engine.deterministic``, or ``engine.on_policy=bitwise``.
        in_order: Whether communication must start before the computation with which it overlaps, so that the GPU must
            keep the order of kernels.
        compiler: Whether there is a C compiler, which Triton needs to start its kernels.
        ranks: Number of training ranks.
    """

    deterministic: bool = False
    in_order: bool = False
    compiler: bool = True
    ranks: int = 1


def needs_order(tensor: int, context: int, compute_capability: tuple[int, int] | None) -> bool:
    """Whether a run needs one queue for all kernels: with tensor or context parallelism on GPUs before Blackwell.

    Megatron-LM refuses to start otherwise (megatron/training/arguments.py, ``validate_args``, with the remark that the
    requirement "no longer exists since the Blackwell architecture"); Megatron-Core says that it is needed "for a
    speedup but not for correctness" (megatron/core/tensor_parallel/layers.py). An unknown GPU counts as an older one.
    """
    return (tensor > 1 or context > 1) and (compute_capability is None or compute_capability < (10, 0))


def has_compiler(environment: Mapping[str, str]) -> bool:
    """Whether Triton would find a C compiler and Python's headers, by its own rules (triton/runtime/build.py)."""
    headers = Path(sysconfig.get_path("include", scheme="posix_prefix"), "Python.h")
    return headers.is_file() and ("CC" in environment or any(shutil.which(name) for name in ("gcc", "clang")))


def worker_environment(options: CudaOptions, needs: Needs, role: Role, user: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a process with a GPU starts with.

    Args:
        options: ``platform.options``.
        needs: Needs of the run.
        role: Role of the process; training ranks get most variables, because rollout engines set their own.
        user: The user's own environment, for settings that have two names.
    """
    # An index means the same GPU to CUDA, NVML, nvidia-smi and vLLM; by itself CUDA puts the fastest first.
    environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", CUDNN_LAST: "1"}
    if options.visible_devices is not None:
        environment[VISIBLE_DEVICES] = options.visible_devices
    if role != "trainer":
        return environment
    if options.expandable_segments and ALLOCATOR_TOO not in user:
        environment[ALLOCATOR] = EXPANDABLE
    if needs.in_order:
        environment[CONNECTIONS] = "1"
    if not needs.compiler:
        environment[WITHOUT_COMPILER] = "1"
    if needs.deterministic:
        environment |= {name: values[0] for name, values in DETERMINISTIC.items()}
    return environment


def contradictions(options: CudaOptions, needs: Needs, user: Mapping[str, str]) -> Iterator[Diagnostic]:
    """Find environment variables of the user that contradict the run's options, or slow the run down.

    Args:
        options: ``platform.options``.
        needs: Needs of the run.
        user: The user's own environment, which workers inherit.
    """
    visible = user.get(VISIBLE_DEVICES)
    if options.visible_devices not in (None, visible) and visible is not None:
        message = f"{VISIBLE_DEVICES}={visible} is already set, and Anytron does not replace your variables"
        fix = f"unset {VISIBLE_DEVICES}, or remove platform.options.visible_devices"
        yield Diagnostic("error", "platform.options.visible_devices", message, fix)
    elif options.visible_devices is not None and (count := options.visible_devices.count(",") + 1) < needs.ranks:
        gpus = f"{count} GPU{'' if count == 1 else 's'}"
        message = f"{options.visible_devices} lists {gpus}, but {needs.ranks} training ranks need one each"
        fix = "list more GPUs, or lower a size of the section parallel"
        yield Diagnostic("error", "platform.options.visible_devices", message, fix)
    allocator = user.get(ALLOCATOR, user.get(ALLOCATOR_TOO))
    if allocator is not None and options.expandable_segments and EXPANDABLE not in allocator.replace(" ", ""):
        name = ALLOCATOR if ALLOCATOR in user else ALLOCATOR_TOO
        message = f"this option has no effect: {name}={allocator} is already set, and Anytron does not replace it"
        fix = f"add {EXPANDABLE} to {name}, or set platform.options.expandable_segments=false"
        yield Diagnostic("warning", "platform.options.expandable_segments", message, fix)
    if needs.in_order and user.get(CONNECTIONS, "1") != "1":
        message = f"{CONNECTIONS}={user[CONNECTIONS]} lets communication start too late to overlap with computation"
        yield Diagnostic("warning", "parallel.tensor_model_parallel_size", message, f"unset {CONNECTIONS}")
    if needs.deterministic:
        for name, values in DETERMINISTIC.items():
            if user.get(name, values[0]) not in values:
                message = f"with {name}={user[name]} results would vary from run to run"
                yield Diagnostic("error", "engine.deterministic", message, f"unset {name}, or set it to {values[0]}")
    if user.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0":
        message = "with TORCH_NCCL_ASYNC_ERROR_HANDLING=0 no rank detects a collective that exceeds its timeout"
        yield Diagnostic("warning", "executor.call_timeout_s", message, "unset TORCH_NCCL_ASYNC_ERROR_HANDLING")
    if not needs.compiler:
        message = (
            "Triton needs a C compiler and Python's headers, and at least one is missing: Megatron's functions are not "
            "compiled, and kernels that need Triton are not used"
        )
        yield Diagnostic("warning", "platform", message, "install gcc and Python's headers, or set CC to a compiler")
