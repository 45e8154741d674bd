"""What has changed in a run's configuration since its last start, and whether the run is still the same."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from anytron.config.options import section_model
from anytron.config.schema import RunConfig
from anytron.tracking.record import Change

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pydantic import BaseModel

FREE = (
    "checkpoint",
    "engine.deterministic",
    "engine.distributed_optimizer",
    "engine.log_prob_chunk_tokens",
    "engine.max_tokens_per_micro_batch",
    "engine.offload",
    "engine.options.virtual_pipeline_model_parallel_size",
    "engine.recompute",
    "engine.sequence_format",
    "environment.memory_gib",
    "environment.processes",
    "environment.timeout_s",
    "executor",
    "parallel",
    "platform",
    "resume",
    "reward_model.max_tokens_per_micro_batch",
    "reward_model.offload",
    "reward_model.parallel",
    "rewards.*.memory_gib",
    "rewards.*.on_error",
    "rewards.*.processes",
    "rewards.*.timeout_s",
    "rollout.check_weights_every",
    "rollout.engine",
    "rollout.lora",
    "rollout.max_batch_size",
    "rollout.num_threads",
    "rollout.options",
    "rollout.placement",
    "rollout.python",
    "rollout.replicas",
    "rollout.sleep",
    "rollout.weights",
    "tracking",
    "trainer",
    "validation",
)
"""Keys, or sections, that say how a run is carried out and not what it learns: they may change when it is resumed."""
NOT_FREE = ("trainer.seed",)
"""Keys inside of these sections that may not."""
IDENTITY = ("critic", "model.config", "model.dtype", "model.freeze", "model.lora", "trainer.seed")
"""Keys that a new run that starts from the checkpoint has to leave as they are, too: the state depends on them."""


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Compare two configurations, given as JSON values. Keys that ``old`` knows nothing of are left out."""
    return list(_walk("", RunConfig, old, new))


def is_free(key: str) -> bool:
    """Whether a run stays the same when a key changes."""
    return _inside(key, FREE) and not _inside(key, NOT_FREE)


def is_identity(key: str) -> bool:
    """Whether the saved state depends on a key."""
    return key == "critic" or (_inside(key, IDENTITY) and not key.startswith("critic."))


def _inside(key: str, sections: tuple[str, ...]) -> bool:
    generic = re.sub(r"\.\d+(?=\.|$)", ".*", key)
    return any(generic == section or generic.startswith(f"{section}.") for section in sections)


def _walk(key: str, model: type[BaseModel] | None, old: Any, new: Any) -> Iterator[Change]:
    inside = f"{key}." if key else ""
    if isinstance(old, dict) and isinstance(new, dict) and model is not None:
        for attribute, field in model.model_fields.items():
            name = field.alias or attribute
            if name in old and name in new:  # an older version has not known all keys
                yield from _walk(f"{inside}{name}", section_model(field.annotation), old[name], new[name])
    elif isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            yield from _walk(f"{inside}{name}", None, old.get(name), new.get(name))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, pair in enumerate(zip(old, new, strict=True)):
            yield from _walk(f"{inside}{index}", model, *pair)
    elif old != new:
        yield Change(key=key, old=old, new=new)
