"""Estimate what vLLM takes of a device: ``EngineInfo.memory``. Imports no vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.workers.engines.memory import BYTES, MemoryPart
from anytron_vllm.options import CPU_CACHE_GIB, VllmOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.config.schema import RunConfig
    from anytron.workers.engines.memory import DeviceMemory, TrainingEstimate, When

DEFAULT_SHARE = 0.9
"""vLLM's own ``gpu_memory_utilization``."""


def estimate(run: RunConfig, training: TrainingEstimate, device: DeviceMemory) -> Sequence[MemoryPart]:
    """Count the weights and the cache that the options ask for; a share of the device holds both."""
    options = VllmOptions.model_validate(run.rollout.options)
    when: When = "generation" if run.rollout.sleep else "always"
    ranks = options.tensor_parallel_size
    size = training.parameters * BYTES[run.model.dtype] // ranks
    weights = MemoryPart("rollout-weights", size, f"{training.parameters:,} numbers over {ranks} processes", when)
    if options.kv_cache_gib is not None:
        cache = int(options.kv_cache_gib * 2**30)
        return [weights, MemoryPart("rollout-cache", cache, "rollout.options.kv_cache_gib", when, exact=True)]
    if not device.accelerator:
        how = "what the engine asks of vLLM on a processor; rollout.options.kv_cache_gib says otherwise"
        return [weights, MemoryPart("rollout-cache", int(CPU_CACHE_GIB * 2**30), how, when)]
    if device.total is None:
        return [weights]
    share = options.gpu_memory_utilization or DEFAULT_SHARE
    rest = max(0, int(share * device.total) - size)
    how = f"what rollout.options.gpu_memory_utilization={share:g} leaves after the weights"
    return [weights, MemoryPart("rollout-cache", rest, how, when)]
