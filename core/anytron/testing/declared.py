"""What a platform declares not to do: in ``Platform.limits``, in its dtypes, or by refusing a configuration."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from anytron.config.schema import RunConfig
from anytron.errors import AnytronError
from anytron.platform import Feature, limits_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anytron.hooks.facade import Hooks
    from anytron.platform import Platform

ASKING: Mapping[Feature, tuple[str, Any]] = MappingProxyType(
    {
        Feature.THD: ("engine.sequence_format", "thd"),
        Feature.BSHD: ("engine.sequence_format", "bshd"),
        Feature.BFLOAT16: ("model.dtype", "bfloat16"),
        Feature.TENSOR_PARALLEL: ("parallel.tensor_model_parallel_size", 2),
        Feature.PIPELINE_PARALLEL: ("parallel.pipeline_model_parallel_size", 2),
        Feature.CONTEXT_PARALLEL: ("parallel.context_parallel_size", 2),
        Feature.EXPERT_PARALLEL: ("parallel.expert_model_parallel_size", 2),
        Feature.RECOMPUTE: ("engine.recompute", "full"),
    }
)
"""The key and the value with which a run asks for a feature; the others are a matter of the model."""


def declared_limits(platform: Platform, hooks: Hooks) -> dict[Feature, str]:
    """Collect the platform's reasons, by the features that it declares not to have.

    The hook ``configure`` is asked with a small configuration for each feature that is a matter of the configuration:
    an error at its key, or an edit that sets another value, is a declaration.
    """
    found = limits_of(platform)
    for feature, (key, value) in ASKING.items():
        if feature not in found and (reason := _refusal(hooks, key, value)):
            found[feature] = reason
    if Feature.BFLOAT16 not in found:
        import torch

        if not platform.runtime().supports_dtype(torch.bfloat16):
            found[Feature.BFLOAT16] = "supports_dtype of its runtime says so"
    return found


def _refusal(hooks: Hooks, key: str, value: Any) -> str:
    section, _, name = key.partition(".")
    asked: dict[str, Any] = {
        "model": {"path": "model"},
        "data": {"source": "jsonl"},
        "rewards": [{"function": "exact"}],
    }
    asked.setdefault(section, {})[name] = value
    if name == "expert_model_parallel_size":
        asked[section]["tensor_model_parallel_size"] = value
    try:
        edits, diagnostics = hooks.remarks(RunConfig.model_validate(asked))
    except AnytronError:  # a rule of its own says what is wrong with the hook
        return ""
    for _, edit in edits:
        if edit.key == key and edit.value != value:
            return edit.reason
    return next((one.message for one in diagnostics if one.severity == "error" and one.key == key), "")
