"""Check that a run's ranks can divide a model: layers, heads, Gated DeltaNet, a vision tower. Imports no Megatron."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, get_args

from anytron.config.diagnostics import Diagnostic
from anytron.config.schema import ModelPart
from anytron_megatron.models.families import has_idle_tower

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anytron.config.schema import RunConfig
    from anytron_megatron.checks.subject import Subject
    from anytron_megatron.options import MegatronOptions


_TENSOR = "parallel.tensor_model_parallel_size"

_PIPELINE = "parallel.pipeline_model_parallel_size"

_CONTEXT = "parallel.context_parallel_size"

_LAYER_SWITCH = "USE_MCORE_GDN"
"""Environment variable of mcore-bridge (config/parser.py): 0 builds Hugging Face layers instead of Megatron layers."""

_FALSE = ("0", "n", "no", "f", "false", "off")


def size_diagnostics(subject: Subject, run: RunConfig, options: MegatronOptions) -> Iterator[Diagnostic]:
    """Check that the parallel sizes divide the model's sizes; sizes that its config does not give are not checked."""
    model = subject.text
    tensor = run.parallel.tensor_model_parallel_size
    pipeline = run.parallel.pipeline_model_parallel_size
    heads, groups = model.get("num_attention_heads"), model.get("num_key_value_heads")
    if heads and heads % tensor:
        yield _not_divisible(_TENSOR, f"{heads} attention heads", tensor)
    # Megatron replicates key/value heads when there are fewer of them than ranks.
    if groups and groups % tensor and tensor % groups:
        yield Diagnostic(
            "error",
            _TENSOR,
            f"{groups} key/value heads are neither a multiple nor a divisor of the tensor-parallel size {tensor}",
            f"use a tensor-parallel size that divides {groups} or is a multiple of it",
        )
    for name in ("intermediate_size", "intermediate_size_mlp", "hidden_size"):
        if model.get(name) and model[name] % tensor:
            yield _not_divisible(_TENSOR, f"{name} {model[name]}", tensor)
    chunks = options.virtual_pipeline_model_parallel_size
    key_chunks = "engine.options.virtual_pipeline_model_parallel_size"
    if chunks > 1 and pipeline == 1:
        yield Diagnostic(
            "error",
            key_chunks,
            "virtual pipeline stages need at least 2 pipeline ranks",
            f"raise {_PIPELINE}, or remove {key_chunks}",
        )
    layers = model.get("num_hidden_layers")
    uneven = _has_uneven_stages(options)
    if layers and layers % pipeline and not uneven:
        yield _not_divisible(_PIPELINE, f"{layers} layers", pipeline)
    elif layers and layers % (pipeline * chunks) and not uneven:
        yield _not_divisible(key_chunks, f"{layers // pipeline} layers of a rank", chunks, into="model chunks")
    longest, context = run.rollout.max_new_tokens, model.get("max_position_embeddings")
    if context and longest >= context and not run.supervised:
        yield Diagnostic(
            "error",
            "rollout.max_new_tokens",
            f"responses of {longest} tokens leave no room for a prompt in the model's context of {context}",
            "lower rollout.max_new_tokens",
        )


def linear_attention_diagnostics(subject: Subject, run: RunConfig) -> Iterator[Diagnostic]:
    """Check parallel sizes, sequence format and the variable ``USE_MCORE_GDN`` for a model with Gated DeltaNet."""
    model = subject.text
    if not _has_linear_attention(model):
        return
    tensor, context = run.parallel.tensor_model_parallel_size, run.parallel.context_parallel_size
    if context > 1 and "linear_num_key_heads" not in model:
        yield Diagnostic(
            "error",
            _CONTEXT,
            "context parallelism can divide the heads of Gated DeltaNet only, and the model has other recurrent layers",
            f"set {_CONTEXT}=1",
        )
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        heads = model.get(name, 0)
        if heads % tensor:
            yield Diagnostic(
                "error",
                _TENSOR,
                f"{name} {heads} cannot be split over {tensor} ranks",
                f"use a size that divides {heads}",
            )
        elif heads % (tensor * context):
            # Context-parallel ranks share the heads of a tensor-parallel rank (patches/delta_net.py).
            yield Diagnostic(
                "error",
                _CONTEXT,
                f"{name} {heads} cannot be split over {tensor * context} ranks, tensor parallel {tensor} times context "
                f"parallel {context}",
                f"use sizes whose product divides {heads}",
            )
    if run.engine.deterministic and run.engine.sequence_format == "thd":
        # mcore_bridge/model/modules/gated_delta_net.py, lines 323 and 399: both are assertions.
        yield Diagnostic(
            "error",
            "engine.deterministic",
            "Megatron's deterministic Gated DeltaNet does not support packed sequences",
            "set engine.sequence_format=bshd or engine.deterministic=false",
        )
    if os.environ.get(_LAYER_SWITCH, "1").lower() in _FALSE:
        yield Diagnostic(
            "error",
            "engine.name",
            f"with {_LAYER_SWITCH}={os.environ[_LAYER_SWITCH]} mcore-bridge builds layers that get no mask and are not "
            "split over ranks",
            f"unset {_LAYER_SWITCH}",
        )


def shared_keys_diagnostics(subject: Subject, run: RunConfig) -> Iterator[Diagnostic]:
    """Check Gemma 4 E2B and E4B: layers use keys and values of earlier ones, each has an embedding of each token."""
    shared, embedded = (subject.text.get(name) or 0 for name in ("num_kv_shared_layers", "hidden_size_per_layer_input"))
    # mcore_bridge/model/mm_gpts/gemma4.py, Gemma4TextGPTModel.forward: "not support"
    if bool(shared) != bool(embedded):
        yield Diagnostic(
            "error",
            subject.key,
            f"num_kv_shared_layers is {shared} and hidden_size_per_layer_input is {embedded}, but mcore-bridge builds "
            "models in which both are 0, or neither is",
            "set both to 0 as in Gemma 4 31B, or neither as in Gemma 4 E2B",
        )
    if not shared:
        return
    if run.parallel.pipeline_model_parallel_size > 1:
        message = (
            "layers share keys and values, which mcore-bridge sends from stage to stage in the shape of padded rows, "
            "also where sequences are packed"
        )
        yield Diagnostic("error", _PIPELINE, message, f"set {_PIPELINE}=1")
    if run.parallel.context_parallel_size > 1:
        message = (
            "each layer has an embedding of each token, which mcore-bridge does not split over context-parallel ranks"
        )
        yield Diagnostic("error", _CONTEXT, message, f"set {_CONTEXT}=1")
    if run.engine.recompute != "none":
        message = "layers share keys and values, and no test compares gradients with layers that are computed again"
        yield Diagnostic("error", "engine.recompute", message, "set engine.recompute=none")


def freeze_diagnostics(policy: Subject, run: RunConfig) -> Iterator[Diagnostic]:
    """Check that the model has the parts of ``model.freeze``, and that every rank keeps something to train."""
    frozen = set(run.model.freeze)
    if frozen and policy.config and not policy.config.get("vision_config"):
        message = f"the model has no vision_config, so it has no parts to freeze: {', '.join(sorted(frozen))}"
        yield Diagnostic("error", "model.freeze", message, "remove model.freeze")
    elif frozen >= (trained := _trained_parts(policy)):
        fix = f"remove {' or '.join(sorted(trained))} from model.freeze"
        message = "all parts are frozen, so nothing is trained"
        if trained == {"language_model"}:
            message = (
                "the language model is frozen, and the other parts are not trained anyway, because Anytron gives "
                f"{policy.config['model_type']} no images: nothing is trained"
            )
        yield Diagnostic("error", "model.freeze", message, fix)
    elif "language_model" in frozen and run.parallel.pipeline_model_parallel_size > 1:
        message = "pipeline stages after the first would train nothing: they hold only the frozen language model"
        yield Diagnostic("error", "model.freeze", message, f"set {_PIPELINE}=1")


def _trained_parts(policy: Subject) -> set[str]:
    """The parts of a vision-language model that a run trains: towers that get no images are frozen anyway."""
    return {"language_model"} if has_idle_tower(policy.config) else set(get_args(ModelPart))


def vision_diagnostics(subject: Subject, run: RunConfig, options: MegatronOptions) -> Iterator[Diagnostic]:
    """Check that the first pipeline chunk has a layer for each deepstack feature.

    mcore-bridge gives these features to the first chunk only, and asserts that it has enough layers.
    """
    chunks = run.parallel.pipeline_model_parallel_size * options.virtual_pipeline_model_parallel_size
    features = len((subject.config.get("vision_config") or {}).get("deepstack_visual_indexes") or ())
    layers = subject.text.get("num_hidden_layers")
    if features and layers and not _has_uneven_stages(options) and layers // chunks < features:
        keys = f"{_PIPELINE} or engine.options.virtual_pipeline_model_parallel_size"
        lower = f"lower {keys}: their product may be at most {layers // features}"
        yield Diagnostic(
            "error",
            _PIPELINE,
            f"the first of {chunks} pipeline chunks has {layers // chunks} layers, but needs {features}: one for each "
            "deepstack feature",
            lower if layers >= features else f"use a model with at least {features} layers",
        )


def _not_divisible(key: str, what: str, size: int, into: str = "ranks") -> Diagnostic:
    return Diagnostic("error", key, f"{what} cannot be split over {size} {into}", f"use a size that divides {what}")


def _has_uneven_stages(options: MegatronOptions) -> bool:
    """Whether the run divides the layers with Megatron's own options, whose result is not checked here."""
    return any("pipeline" in name for name in options.transformer)


def _has_linear_attention(model: Mapping[str, Any]) -> bool:
    """Whether the Hugging Face config of a language model describes recurrent layers."""
    return "linear_attention" in (model.get("layer_types") or ()) or bool(model.get("linear_num_value_heads"))
