"""Find what has changed in a run's configuration since its last start, and whether it may still be resumed.

Run ``python -m anytron.record.checkpoint.differences docs/how-to/resume-a-run.md`` after a change of the keys; a test
fails if the page is not up to date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from anytron.config.options import section_model
from anytron.config.schema import RunConfig
from anytron.record.tracking.record import Change

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from pydantic import BaseModel


CARRIED_OUT: Mapping[str, str] = MappingProxyType(
    {
        "checkpoint": "when and where the state is saved",
        "data.cache_dir": "where tokenised prompts are kept",
        "engine.deterministic": "how kernels add up",
        "engine.distributed_optimizer": "where the optimizer's state is kept",
        "engine.log_prob_chunk_tokens": "how much is computed at one time",
        "engine.max_tokens_per_micro_batch": "how an update is divided",
        "engine.on_policy": "how kernels add up",
        "engine.offload": "where the state is kept during generation",
        "engine.options.virtual_pipeline_model_parallel_size": "how layers are shared out",
        "engine.recompute": "what the backward pass computes again",
        "engine.sequence_format": "how sequences are laid out",
        "environment.memory_gib": "a limit of the environment's processes",
        "environment.processes": "how many processes run environments",
        "environment.attempts": "how often an agent is tried",
        "environment.timeout_s": "a limit of the environment's calls",
        "executor": "where processes run",
        "parallel": "how the work is shared out",
        "platform": "what computes",
        "resume": "it is what continues the run",
        "reward_model.max_tokens_per_micro_batch": "how scoring is divided",
        "reward_model.offload": "where the reward model's weights are kept",
        "reward_model.parallel": "how the reward model's work is shared out",
        "rewards.*.memory_gib": "a limit of the function's processes",
        "rewards.*.on_error": "what follows when the function fails",
        "rewards.*.processes": "how many processes run the function",
        "rewards.*.timeout_s": "a limit of the function's calls",
        "rollout.check_weights_every": "a check",
        "rollout.endpoint": "who may ask the model meanwhile",
        "rollout.endpoint_limits": "how much memory clients may use",
        "rollout.engine": "what generates",
        "rollout.lora": "how adapters reach the rollout",
        "rollout.max_batch_size": "how many responses are made at one time",
        "rollout.num_threads": "how many threads generate",
        "rollout.options": "settings of the rollout engine",
        "rollout.placement": "where responses are made",
        "rollout.python": "which Python runs the rollout engine",
        "rollout.quantization": "how exactly the rollout computes",
        "rollout.replicas": "how many rollout engines there are",
        "rollout.sleep": "what holds the device's memory",
        "rollout.weights": "how weights reach the rollout",
        "tracking": "what is shown, and where",
        "trainer": "how long the run goes on, and what it keeps; `trainer.seed` may not change",
        "validation": "what is examined, and when",
    }
)
"""Keys, or sections, that say how a run is carried out and not what it learns; and what each of them decides."""
REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        "algorithm.dynamic_sampling": "remedy of steps without signal",
        "algorithm.dynamic_sampling_rounds": "remedy of steps without signal, or with too few groups",
        "algorithm.importance_correction": "remedy of engines that disagree: `measured` says by how much",
        "algorithm.kl_coefficient": "remedy where memory is short: 0 builds no reference model",
        "algorithm.max_steps_without_signal": "remedy of steps without signal",
        "algorithm.overlong_masking": "remedy of steps without signal",
        "critic.optimizer.lr": "remedy of numbers that are not finite",
        "critic.optimizer.warmup_steps": "remedy of numbers that are not finite",
        "optimizer.lr": "remedy of numbers that are not finite",
        "optimizer.warmup_steps": "remedy of numbers that are not finite",
        "rewards.*.weight": "remedy of rewards that are too large",
        "rollout.max_new_tokens": "remedy of responses that are cut off, or of memory that is short; if other prompts "
        "fit the model's context then, they are drawn from the beginning",
        "rollout.min_new_tokens": "remedy of empty responses",
        "rollout.samples_per_prompt": "remedy of steps without signal",
        "rollout.stop": "remedy of empty responses",
    }
)
"""Keys that an error or a warning of a run tells the user to change, and why; a resumed run must accept the change."""
NOT_FREE = ("trainer.seed",)
"""Keys inside of the sections of :data:`CARRIED_OUT` that may not change."""
IDENTITY = ("critic", "model.config", "model.dtype", "model.freeze", "model.lora", "trainer.seed")
"""Keys that must stay the same even in a new run from a checkpoint, because the saved state depends on them."""


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Compare two configurations, given as JSON values. Keys that are missing in ``old`` are ignored."""
    return list(_walk("", RunConfig, old, new))


def is_free(key: str) -> bool:
    """Whether a key may change when a run is resumed."""
    return carries_out(key) or _inside(key, REMEDIES)


def carries_out(key: str) -> bool:
    """Whether a key only says how a run is carried out, and so has no effect on what it learns."""
    return _inside(key, CARRIED_OUT) and not _inside(key, NOT_FREE)


def is_identity(key: str) -> bool:
    """Whether the saved state depends on a key, so that even a new run from the checkpoint must not change it."""
    return key == "critic" or (_inside(key, IDENTITY) and not key.startswith("critic."))


def _inside(key: str, sections: Collection[str]) -> bool:
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


BEGIN, END = "<!-- keys: written by python -m anytron.record.checkpoint.differences -->", "<!-- end of keys -->"


def render() -> str:
    """Return the table of keys that may change when a run is resumed, as Markdown."""
    rows = [f"| `{key}` | {reason} |" for key, reason in {**REMEDIES, **CARRIED_OUT}.items()]
    return "\n".join(["| key, or section | why it may change |", "|---|---|", *rows])


def drawn(page: str) -> str:
    """Return the page with its table of keys replaced by the current one."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{render()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(drawn(file.read_text(encoding="utf-8")), encoding="utf-8")
