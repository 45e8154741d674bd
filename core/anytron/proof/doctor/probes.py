"""What is asked of a device, one function for each question. They run in a process of their own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from anytron.base.components import EXECUTORS, load_component
from anytron.kernels.contract import KernelName, KernelSpec, LogProbSpec
from anytron.proof.doctor.attention import probe_attention
from anytron.proof.doctor.log_probs import probe_log_probs
from anytron.workers.executor.protocol import ExaminedExecutor

if TYPE_CHECKING:
    from anytron.proof.doctor.bench import Bench

MOST_DEVICES = 16


def devices(bench: Bench) -> dict[str, Any]:
    """Count the devices that a process sees, and give name and memory of each."""
    runtime = bench.runtime
    count, found = runtime.device_count(), []
    for index in range(min(count, MOST_DEVICES)):
        runtime.set_device(index)
        found.append({"name": runtime.device_name(), "total": runtime.memory_stats().total})
    if count:
        runtime.set_device(0)
    return {"count": count, "devices": found, "type": runtime.device_type}


def kernels(bench: Bench) -> dict[str, Any]:
    """Ask the plugins for every kernel, as the engine does, and say who supplied which, and what it is."""
    hooks, device = bench.session.hooks, bench.runtime.device_type
    errors: dict[str, str] = {}
    functions: dict[str, str] = {}

    def ask(label: str, hook: Any, *arguments: Any) -> None:
        try:
            kernel = hook(*arguments)
            while isinstance(kernel, partial):
                kernel = kernel.func
            named = kernel if hasattr(kernel, "__qualname__") else type(kernel)
            functions[label] = ".".join(filter(None, (named.__module__, named.__qualname__)))
        except Exception as error:  # noqa: BLE001 - a plugin's own code; the other kernels are asked for all the same
            errors[label] = f"{type(error).__name__}: {error}"

    ask("attention_kernel", hooks.attention_kernel, bench.attention())
    ask("log_prob_kernel", hooks.log_prob_kernel, LogProbSpec(32000, 1, 1024, device, bench.dtype))
    for name in KernelName:
        norm = {"eps": 1e-6, "zero_centered": False} if name.value.endswith("_norm") else {}
        ask(f"fused_kernel {name.value}", hooks.fused_kernel, name, KernelSpec(device, bench.dtype, norm))
    descriptions = hooks.kernel_descriptions()
    found = {
        kernel: {
            "supplier": plugin,
            "description": "; ".join(descriptions.get(kernel, ())),
            "function": functions.get(kernel, "").partition(".<locals>")[0],
        }
        for kernel, plugin in hooks.suppliers().items()
    }
    return {"kernels": found, "errors": errors}


def attention(bench: Bench, layer: str) -> dict[str, Any]:
    """Compute attention in a layer: ``thd``, ``bshd``, or one of them and ``window``."""
    sequence_format, _, window = layer.partition(" ")
    return probe_attention(bench, "thd" if sequence_format == "thd" else "bshd", windowed=bool(window))


def log_probs(bench: Bench) -> dict[str, Any]:
    """Compute log-probs and entropies."""
    return probe_log_probs(bench)


def executor(bench: Bench, name: str) -> dict[str, Any]:
    """Let an executor examine what it starts processes with, if it has something to examine."""
    found = load_component(EXECUTORS, name, "executor.kind")
    if not issubclass(found, ExaminedExecutor):
        return {"entries": []}
    return {"entries": [one.as_json() for one in found.examine(bench.run, bench.session.platform)]}
