"""Say, after ``anytron verify``, how to prove a family that no test compares with Hugging Face. Imports no Megatron."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from anytron.base.version import ISSUES
from anytron.config.options import chosen_engines
from anytron.task.data.model_files import has_experts
from anytron_megatron.checks.subject import Subject
from anytron_megatron.models.families import COLUMNS, Family, family_of
from anytron_megatron.options import ENGINE, MegatronOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.config.schema import RunConfig
    from anytron.proof.checks import Report

_NEEDED = ("export-equals-import", "hf-logits", "hf-log-probs", "hf-gradients")
"""Checks without which nothing is known about a family."""
_TRIED = {
    "thd": "engine.sequence_format=thd",
    "bshd": "engine.sequence_format=bshd",
    "TP": "parallel.tensor_model_parallel_size=2",
    "PP": "parallel.pipeline_model_parallel_size=2",
    "VPP": "parallel.pipeline_model_parallel_size=2 engine.options.virtual_pipeline_model_parallel_size=2",
    "CP": "parallel.context_parallel_size=2",
    "EP": "parallel.data_parallel_size=2 parallel.expert_model_parallel_size=2",
    "LoRA": "model.lora={}",
}
"""Overrides with which ``anytron verify`` tries an entry of :data:`COLUMNS` that it did not try.

The other entries need more than an override: images need data with images; MTP and replay are refused for families that
no test proves; and ``anytron verify`` refuses generation on the training ranks.
"""


def proposal(run: RunConfig, report: Report) -> Iterator[str]:
    """Yield lines about the family of the policy: the row that the checks support, what proves it, where to send it.

    Args:
        run: The run whose model was verified, with the Megatron engine.
        report: The results. A row is proposed only if no check failed, and if those that compare the model with
            transformers were made.
    """
    subject = Subject.policy(run)
    model_type = str(subject.config.get("model_type"))
    family = family_of(subject.config)
    if family is None or family.proof:
        return
    yield ""
    yield f"No test of Anytron proves the family {model_type}."
    passed = {result.name for result in report.results if result.status == "passed"}
    failed = [result.name for result in report.results if result.status == "failed"]
    skipped = [name for name in _NEEDED if name not in passed and name not in failed]
    if failed or skipped:
        reasons = [f"{what}: {', '.join(names)}" for what, names in (("failed", failed), ("skipped", skipped)) if names]
        yield f"These results do not prove it ({'; '.join(reasons)}). Send them to {ISSUES}"
        return
    shown = _proven(run, passed)
    yield "These results support this row of backends/anytron_megatron/models/families.py:"
    yield ""
    yield f"    {_row(replace(family, title=family.title or model_type, proof=shown))}"
    yield ""
    others = [column for column in _TRIED if column not in shown and (column != "EP" or has_experts(subject.text))]
    if others:
        yield f"Not tried: {', '.join(f'{column} ({_TRIED[column]})' for column in others)}"
    yield f"Send the row and the results to {ISSUES}"
    file = "published_images.py" if subject.config.get("vision_config") else "published_text.py"
    yield (
        f"To prove it, add its configuration with small sizes to tests/backends/megatron/families/{file}, its "
        f"layouts to layouts.py beside it, and the row; then run: tox -e families -- -k {model_type}"
    )


def _proven(run: RunConfig, passed: set[str]) -> tuple[str, ...]:
    """Entries of :data:`COLUMNS` that the passed checks tried."""
    sizes = MegatronOptions.of(run).sizes(run)
    rollout = chosen_engines(run.engine.name, run.rollout.engine).get("rollout.options")
    other = "packed-equals-padded" in passed
    sampled = "rollout-equals-training" in passed
    tried = {
        "thd": other or run.engine.sequence_format == "thd",
        "bshd": other or run.engine.sequence_format == "bshd",
        "TP": sizes.tensor > 1,
        "PP": sizes.pipeline > 1,
        "VPP": sizes.virtual_pipeline > 1,
        "CP": sizes.context > 1,
        "EP": sizes.expert > 1,
        "replay": run.rollout.replay_routing and sampled,
        "MTP": "multi-token-prediction" in passed,
        "LoRA": "adapters-equal-merged" in passed,
        "cache": rollout is not None and rollout.part_of == ENGINE and sampled,
    }
    return tuple(column for column in COLUMNS if tried.get(column))


def _row(family: Family) -> str:
    """A row as Python code, with its fields that are not the defaults."""
    values = [(one.name, getattr(family, one.name), one.default) for one in fields(family)]
    named = [(name, value) for name, value, default in values if value != default]
    (_, model_type), *others = named
    return f'Family("{model_type}", {", ".join(f"{name}={value!r}" for name, value in others)})'.replace("'", '"')
