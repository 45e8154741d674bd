"""Describe the rollout engine ``transformers`` without importing it: options, memory and capabilities.

Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from anytron.base.components import Component, EngineInfo
from anytron.config.section import Section
from anytron.workers.engines.estimates import BYTES, MemoryPart, key_value_elements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.config.schema import RunConfig
    from anytron.workers.engines.estimates import DeviceMemory, TrainingEstimate, When


class TransformersOptions(Section):
    """Options of the rollout engine ``transformers``."""

    attn_implementation: str | None = None
    """Attention implementation of transformers: ``sdpa``, ``eager``, ...; default: transformers' choice."""
    device_map: Literal["balanced"] | None = None
    """``balanced`` spreads a model that is too large for one device over all devices that the process can use; default:
    the process's current device."""


TRANSFORMERS = EngineInfo(
    engine="anytron_rollout.transformers_engine:TransformersEngine",
    options_model=TransformersOptions,
    capabilities=frozenset({"observation", "comparison", "sleep", "routing", "quantization", "bitwise"}),
    takes_stream=True,
    platform_check="anytron_rollout.checks:diagnostics",
    components=(Component("transformers", "transformers"), Component("accelerate", "accelerate")),
    memory="anytron_rollout.options:estimate",
    process_bytes=270 << 20,
)

LOGITS = 6
"""Number of ``[B, V]`` tensors that exist at a time in a step of sampling: logits, transformers' copy of the logits,
logits divided by the temperature, log-probs, noise, and the choice."""


def estimate(run: RunConfig, training: TrainingEstimate, device: DeviceMemory) -> Sequence[MemoryPart]:
    """Estimate a replica's memory: weights, keys and values of a full batch at full length, and logits."""
    del device
    rollout, element = run.rollout, BYTES[run.model.dtype]
    when: When = "generation" if rollout.sleep else "always"
    # A model that is spread lies on all devices that the process can use: with colocated ones, those of the ranks.
    spread = TransformersOptions.model_validate(rollout.options).device_map is not None
    devices = run.parallel.world_size if spread and rollout.placement == "colocated" else 1
    where = f"spread over {devices} devices" if devices > 1 else "the whole model on a replica"
    weights = MemoryPart(
        "rollout-weights",
        training.parameters * element // devices,
        f"{training.parameters:,} numbers of {run.model.dtype}, {where}",
        when,
    )
    elements = key_value_elements(training.config)
    rows = min(rollout.max_batch_size, run.data.prompts_per_step * rollout.samples_per_prompt)
    how = f"{rows} responses of {rollout.max_new_tokens} tokens, without their prompts; {elements:,} numbers of a token"
    size = rows * rollout.max_new_tokens * elements * element // devices
    cache = MemoryPart("rollout-cache", size, how, "generation")
    entries = training.config.get("vocab_size", 0)
    what = f"{LOGITS} float32 tensors of {rows} rows x {entries:,} entries"
    return [weights, cache, MemoryPart("rollout-logits", LOGITS * rows * entries * 4, what, "generation")]
