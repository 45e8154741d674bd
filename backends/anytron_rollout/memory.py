"""Estimate what the engine ``transformers`` takes of a device: ``EngineInfo.memory``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.workers.engines.memory import BYTES, MemoryPart, key_value_elements
from anytron_rollout.options import TransformersOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.config.schema import RunConfig
    from anytron.workers.engines.memory import DeviceMemory, TrainingEstimate, When

LOGITS = 6
"""Tensors of ``[B, V]`` that one step of sampling has at a time: logits, the copy that transformers hands on, scaled by
the temperature, log-probs, noise, and the choice."""


def estimate(run: RunConfig, training: TrainingEstimate, device: DeviceMemory) -> Sequence[MemoryPart]:
    """Count the weights of a replica, keys and values of a full batch at the end of its responses, and its logits."""
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
