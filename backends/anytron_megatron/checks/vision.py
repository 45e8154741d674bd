"""Check that a vision-language model can be trained in this run. Imports no Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from anytron.config.diagnostics import Diagnostic
from anytron.config.schema import ModelPart

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.config.schema import RunConfig
    from anytron_megatron.checks.subject import Subject
    from anytron_megatron.options import MegatronOptions

_PIPELINE = "parallel.pipeline_model_parallel_size"


def freeze_diagnostics(policy: Subject, run: RunConfig) -> Iterator[Diagnostic]:
    """Check that the model has the parts of ``model.freeze``, and that every rank keeps something to train."""
    frozen = set(run.model.freeze)
    if frozen and policy.config and not policy.config.get("vision_config"):
        message = f"a model without vision_config has no parts {', '.join(sorted(frozen))}"
        yield Diagnostic("error", "model.freeze", message, "leave model.freeze out")
    elif frozen == set(get_args(ModelPart)):
        yield Diagnostic("error", "model.freeze", "nothing is left to train", "leave one part out")
    elif "language_model" in frozen and run.parallel.pipeline_model_parallel_size > 1:
        message = "pipeline stages after the first hold nothing but the frozen language model"
        yield Diagnostic("error", "model.freeze", message, f"set {_PIPELINE}=1")


def vision_diagnostics(subject: Subject, run: RunConfig, options: MegatronOptions) -> Iterator[Diagnostic]:
    """Check that the first pipeline chunk has a layer for each deepstack feature.

    mcore-bridge gives these features to the first chunk only, and asserts that it has enough layers.
    """
    chunks = run.parallel.pipeline_model_parallel_size * options.virtual_pipeline_model_parallel_size
    features = len((subject.config.get("vision_config") or {}).get("deepstack_visual_indexes") or ())
    layers = subject.text.get("num_hidden_layers")
    uneven = any("pipeline" in name for name in options.transformer)
    if features and layers and not uneven and layers // chunks < features:
        yield Diagnostic(
            "error",
            _PIPELINE,
            f"the first of {chunks} pipeline chunks has {layers // chunks} layers, and {features} deepstack features "
            "are added to the first layers of the language model",
            f"use at most {max(1, layers // features)} chunks (ranks times virtual ones)",
        )
