"""The Megatron backend as a plugin: what it requires, checks, sets and patches. Light to import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytron.hooks.markers import hookimpl
from anytron.hooks.types import Diagnostic, Requirement
from anytron_megatron.critic_checks import as_policy, critic_diagnostics, of_critic
from anytron_megatron.expert_checks import expert_diagnostics
from anytron_megatron.linear_attention_checks import linear_attention_diagnostics
from anytron_megatron.lora_settings import lora_diagnostics
from anytron_megatron.model_checks import model_diagnostics
from anytron_megatron.vision_checks import vision_diagnostics
from anytron_megatron.weight_files import INDEX, SINGLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from anytron.config.schema import RunConfig
    from anytron.hooks.types import PatchContext, ProcessInfo
    from anytron.patches import Patch, Phase

ENGINE = "megatron"
_INSTALL = "pip install 'anytron' again, or the version in constraints/"


class MegatronBackend:
    """Entry point ``megatron`` of the group ``anytron.plugins``."""

    @hookimpl
    def requirements(self, engine: str | None) -> Iterable[Requirement]:
        """Name the engine's libraries, with the ranges that its patches and tests were made for."""
        if engine not in (None, ENGINE):
            return ()  # an engine that is composed of this one's parts says itself what it needs
        return (
            Requirement("torch", ">=2.6", _INSTALL),
            Requirement("megatron-core", ">=0.16.1,<0.17", _INSTALL),
            Requirement("mcore-bridge", ">=1.6.5,<1.7", _INSTALL),
            Requirement("peft", ">=0.19,<0.21", _INSTALL),
            Requirement("transformers", ">=5.0,<6", _INSTALL),
            Requirement("datasets", ">=4", "pip install datasets: mcore-bridge imports it without declaring it"),
            Requirement("pillow", ">=10", "pip install pillow: mcore-bridge imports it without declaring it"),
        )

    @hookimpl
    def configure(self, config: RunConfig) -> Iterable[Diagnostic]:
        """Find settings that Megatron would refuse after minutes, or compute wrongly."""
        if config.engine.name != ENGINE:
            return []
        found = _diagnostics(config)
        if config.critic is None:
            return found
        critic = config if config.critic.path is None else as_policy(config)
        return [
            *found,
            *of_critic(_diagnostics(critic), known=found),
            *critic_diagnostics(config, _hf_config(config), _hf_config(critic)),
        ]

    @hookimpl
    def runtime_env(self, process: ProcessInfo) -> Mapping[str, str]:
        """Keep tokenizers, used by data workers of training ranks, from starting threads."""
        if process.role != "trainer":
            return {}
        return {"TOKENIZERS_PARALLELISM": "false"}

    @hookimpl
    def patch_model(self, phase: Phase, context: PatchContext) -> Iterable[Patch]:
        """Return Megatron's patches, for training ranks only."""
        if context.role != "trainer":
            return []
        from anytron_megatron.patches import trainer_patches

        return trainer_patches(phase, context)


def _diagnostics(config: RunConfig) -> list[Diagnostic]:
    """Hold the run against its policy's model."""
    model = _hf_config(config)
    text = model.get("text_config", model)
    return [
        *model_diagnostics(config, model),
        *_size_diagnostics(config, text),
        *linear_attention_diagnostics(config, text),
        *vision_diagnostics(config, model),
        *expert_diagnostics(config, text),
        *lora_diagnostics(config),
        *_other_diagnostics(config),
    ]


def _size_diagnostics(config: RunConfig, model: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """Compare the model's sizes with the parallel ones; sizes that are not given are not judged."""
    tensor = config.parallel.tensor_model_parallel_size
    pipeline = config.parallel.pipeline_model_parallel_size
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
    chunks = config.parallel.virtual_pipeline_model_parallel_size
    key_chunks = "parallel.virtual_pipeline_model_parallel_size"
    if chunks > 1 and pipeline == 1:
        yield Diagnostic(
            "error", key_chunks, "an interleaved schedule needs pipeline ranks", f"raise {key_pipeline} or leave it out"
        )
    layers = model.get("num_hidden_layers")
    # Uneven stages have options of Megatron's own; who sets them knows.
    uneven = [name for name in config.engine.options if "pipeline" in name]
    if layers and layers % pipeline and not uneven:
        yield _not_divisible(key_pipeline, f"{layers} layers", pipeline)
    elif layers and layers % (pipeline * chunks) and not uneven:
        yield _not_divisible(key_chunks, f"{layers // pipeline} layers of a rank", chunks)
    longest, context = config.rollout.max_new_tokens, model.get("max_position_embeddings")
    if context and longest >= context:
        yield Diagnostic(
            "error",
            "rollout.max_new_tokens",
            f"responses of {longest} tokens leave no room for a prompt in the model's context of {context}",
            "shorten the responses",
        )


def _other_diagnostics(config: RunConfig) -> Iterator[Diagnostic]:
    """Find what Megatron and mcore-bridge refuse whatever the model's sizes are."""
    names = {"optimizer.name": config.optimizer.name}
    if config.critic is not None:
        names["critic.optimizer.name"] = config.critic.optimizer.name
    for key, name in names.items():
        if name != "adam" and config.engine.distributed_optimizer:
            # megatron/core/optimizer/distrib_optimizer.py: "Only Adam and HybridDeviceOptimizer currently supported".
            yield Diagnostic(
                "error",
                "engine.distributed_optimizer",
                f"Megatron's distributed optimizer knows Adam only, and {key} is {name}",
                f"set engine.distributed_optimizer=false, or {key}=adam",
            )
    if config.model.path is not None and not _has_safetensors(Path(config.model.path)):
        yield Diagnostic(
            "error",
            "model.path",
            f"mcore-bridge reads {SINGLE} or {INDEX}, and {config.model.path} has neither",
            "convert the weights: load the model with transformers and save it with save_pretrained",
        )


def _has_safetensors(directory: Path) -> bool:
    """Whether the bridge can read the weights; True where there are none at all, which the core reports."""
    weights = any(any(directory.glob(pattern)) for pattern in ("*.safetensors", "*.bin"))
    return not weights or any((directory / name).is_file() for name in (SINGLE, INDEX))


def _not_divisible(key: str, what: str, size: int) -> Diagnostic:
    return Diagnostic("error", key, f"{what} cannot be split over {size} ranks", f"use a size that divides {what}")


def _hf_config(config: RunConfig) -> Mapping[str, Any]:
    """Return the Hugging Face config. Empty if there is none: the core's check of files reports that."""
    if config.model.path is None:
        return config.model.config or {}
    path = Path(config.model.path) / "config.json"
    model: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return model
