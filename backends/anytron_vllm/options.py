"""Describe the rollout engine ``vllm`` without importing it: its options and capabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from anytron.base.components import Component, EngineInfo
from anytron.config.section import Section
from anytron.workers.engines.estimates import BYTES, MemoryPart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.config.schema import RunConfig
    from anytron.workers.engines.estimates import DeviceMemory, TrainingEstimate, When


BUFFER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM allows for ``max_lora_rank`` (vllm/config/lora.py, ``MaxLoRARanks``, 0.32)."""
CPU_CACHE_GIB = 1.0
"""Default memory for keys and values on the CPU, where vLLM would take half of the machine's memory."""


class VllmOptions(Section):
    """Options of the rollout engine ``vllm``."""

    tensor_parallel_size: int = Field(1, ge=1)
    """Processes that share each layer of the model; vLLM starts them."""
    max_model_len: int | None = Field(None, ge=2)
    """Longest prompt and response together, in tokens; default: the model's context. vLLM needs room in its cache for
    at least one sequence of that length."""
    gpu_memory_utilization: float | None = Field(None, gt=0.0, le=1.0)
    """Share of the device's memory that vLLM takes, weights and cache together; default: vLLM's own (0.9). A training
    rank on the same device needs the rest."""
    kv_cache_gib: float | None = Field(None, gt=0.0)
    """Memory of the cache of keys and values, in GiB; default: what ``gpu_memory_utilization`` leaves after
    the weights; on a CPU 1."""
    max_num_batched_tokens: int | None = Field(None, ge=1)
    """Largest number of tokens in one step of the engine, prompts included; default: vLLM's. On a CPU at least
    ``max_model_len``, because each prompt is computed in one step."""
    enable_prefix_caching: bool = True
    """Compute a common beginning of prompts once. The cache is emptied at every update of the weights."""
    enforce_eager: bool = True
    """Run the model eagerly. If false, vLLM compiles the model and records graphs, which takes minutes at the start and
    is faster afterwards."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of ``vllm.EngineArgs``, passed on unchanged; arguments that this engine sets itself are
    refused."""


VLLM = EngineInfo(
    engine="anytron_vllm.engine:VllmEngine",
    options_model=VllmOptions,
    capabilities=frozenset({"observation", "adapters", "routing", "quantization", "sleep"}),
    takes_stream=True,
    platform_check="anytron_vllm.checks:diagnostics",
    components=(Component("vllm", "vllm"), Component("transformers", "transformers")),
    memory="anytron_vllm.options:estimate",
)

DEFAULT_SHARE = 0.9
"""vLLM's own ``gpu_memory_utilization``."""


def estimate(run: RunConfig, training: TrainingEstimate, device: DeviceMemory) -> Sequence[MemoryPart]:
    """Estimate the memory of the weights and of the key-value cache on a device, from the options."""
    options = VllmOptions.model_validate(run.rollout.options)
    when: When = "generation" if run.rollout.sleep else "always"
    ranks = options.tensor_parallel_size
    element = (
        1 if run.rollout.quantization else BYTES[run.model.dtype]
    )  # embeddings and the head, a small part, keep it
    size = training.parameters * element // ranks
    weights = MemoryPart("rollout-weights", size, f"{training.parameters:,} numbers over {ranks} processes", when)
    if options.kv_cache_gib is not None:
        cache = int(options.kv_cache_gib * 2**30)
        return [weights, MemoryPart("rollout-cache", cache, "rollout.options.kv_cache_gib", when, exact=True)]
    if not device.accelerator:
        how = "default on a CPU; rollout.options.kv_cache_gib changes it"
        return [weights, MemoryPart("rollout-cache", int(CPU_CACHE_GIB * 2**30), how, when)]
    if device.total is None:
        return [weights]
    share = options.gpu_memory_utilization or DEFAULT_SHARE
    rest = max(0, int(share * device.total) - size)
    how = f"what rollout.options.gpu_memory_utilization={share:g} leaves after the weights"
    return [weights, MemoryPart("rollout-cache", rest, how, when)]
