"""Check that the parallel layout can divide a model. Imports no Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.config.diagnostics import Diagnostic

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.config.schema import RunConfig
    from anytron_megatron.checks.subject import Subject
    from anytron_megatron.options import MegatronOptions


def size_diagnostics(subject: Subject, run: RunConfig, options: MegatronOptions) -> Iterator[Diagnostic]:
    """Compare a model's sizes with the parallel ones; sizes that its config does not give are not checked."""
    model = subject.text
    tensor = run.parallel.tensor_model_parallel_size
    pipeline = run.parallel.pipeline_model_parallel_size
    key_tensor, key_pipeline = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"
    heads, groups = model.get("num_attention_heads"), model.get("num_key_value_heads")
    if heads and heads % tensor:
        yield _not_divisible(key_tensor, f"{heads} attention heads", tensor)
    # Megatron replicates key/value heads when there are fewer of them than ranks.
    if groups and groups % tensor and tensor % groups:
        yield Diagnostic(
            "error",
            key_tensor,
            f"{groups} key/value heads are neither a multiple nor a divisor of {tensor}",
            f"use a tensor-parallel size that divides {groups} or is a multiple of it",
        )
    for name in ("intermediate_size", "hidden_size"):
        if model.get(name) and model[name] % tensor:
            yield _not_divisible(key_tensor, f"{name} {model[name]}", tensor)
    chunks = options.virtual_pipeline_model_parallel_size
    key_chunks = "engine.options.virtual_pipeline_model_parallel_size"
    if chunks > 1 and pipeline == 1:
        yield Diagnostic(
            "error", key_chunks, "an interleaved schedule needs pipeline ranks", f"raise {key_pipeline} or leave it out"
        )
    layers = model.get("num_hidden_layers")
    # Uneven stages have options of Megatron's own; who sets them knows.
    uneven = [name for name in options.transformer if "pipeline" in name]
    if layers and layers % pipeline and not uneven:
        yield _not_divisible(key_pipeline, f"{layers} layers", pipeline)
    elif layers and layers % (pipeline * chunks) and not uneven:
        yield _not_divisible(key_chunks, f"{layers // pipeline} layers of a rank", chunks)
    longest, context = run.rollout.max_new_tokens, model.get("max_position_embeddings")
    if context and longest >= context and not run.supervised:
        yield Diagnostic(
            "error",
            "rollout.max_new_tokens",
            f"responses of {longest} tokens leave no room for a prompt in the model's context of {context}",
            "shorten the responses",
        )


def _not_divisible(key: str, what: str, size: int) -> Diagnostic:
    return Diagnostic("error", key, f"{what} cannot be split over {size} ranks", f"use a size that divides {what}")
