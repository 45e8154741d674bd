"""Settings that do not go together with a vision-language model, found before anything is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from anytron.config.diagnostics import Diagnostic
from anytron.config.schema import ModelPart
from anytron_megatron.options import MegatronOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anytron.config.schema import RunConfig


def vision_diagnostics(config: RunConfig, model: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """Find what cannot be trained.

    Args:
        config: The run's configuration.
        model: The Hugging Face config; empty if there is none.
    """
    pipeline = config.parallel.pipeline_model_parallel_size
    frozen, vision = set(config.model.freeze), model.get("vision_config")
    if frozen and model and not vision:
        parts = ", ".join(sorted(frozen))
        yield Diagnostic(
            "error", "model.freeze", f"a model without vision_config has no parts {parts}", "leave model.freeze out"
        )
    elif frozen == set(get_args(ModelPart)):
        yield Diagnostic("error", "model.freeze", "nothing is left to train", "leave one part out")
    elif "language_model" in frozen and pipeline > 1:
        yield Diagnostic(
            "error",
            "model.freeze",
            "pipeline stages after the first hold nothing but the frozen language model",
            "set parallel.pipeline_model_parallel_size=1",
        )
    yield from _deepstack(MegatronOptions.of(config), model, pipeline)


def _deepstack(options: MegatronOptions, model: Mapping[str, Any], pipeline: int) -> Iterator[Diagnostic]:
    """mcore-bridge gives deepstack features to the first chunk only, and asserts that it has enough layers."""
    chunks = pipeline * options.virtual_pipeline_model_parallel_size
    features = len((model.get("vision_config") or {}).get("deepstack_visual_indexes") or ())
    layers = model.get("text_config", model).get("num_hidden_layers")
    uneven = any("pipeline" in name for name in options.transformer)
    if features and layers and not uneven and layers // chunks < features:
        yield Diagnostic(
            "error",
            "parallel.pipeline_model_parallel_size",
            f"the first of {chunks} pipeline chunks has {layers // chunks} layers, and {features} deepstack features "
            "are added to the first layers of the language model",
            f"use at most {max(1, layers // features)} chunks (ranks times virtual ones)",
        )
