"""The Megatron backend as a plugin: what it requires, checks, sets and patches. Light to import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytron.config.diagnostics import Diagnostic
from anytron.hooks.markers import hookimpl
from anytron.hooks.types import Requirement
from anytron_megatron.checks.critic import as_policy, critic_diagnostics, of_critic
from anytron_megatron.checks.experts import expert_diagnostics
from anytron_megatron.checks.linear_attention import linear_attention_diagnostics
from anytron_megatron.checks.lora import lora_diagnostics
from anytron_megatron.checks.model import model_diagnostics
from anytron_megatron.checks.optimizer import optimizer_diagnostics
from anytron_megatron.checks.sizes import size_diagnostics
from anytron_megatron.checks.vision import vision_diagnostics
from anytron_megatron.models.weight_files import INDEX, SINGLE
from anytron_megatron.names import ENGINE
from anytron_megatron.options import MegatronOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from anytron.config.schema import RunConfig
    from anytron.hooks.types import PatchContext, ProcessInfo
    from anytron.patches import Patch, Phase

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
    model, options = _hf_config(config), MegatronOptions.of(config)
    text = model.get("text_config", model)
    return [
        *model_diagnostics(config, model),
        *size_diagnostics(config, options, text),
        *linear_attention_diagnostics(config, text),
        *vision_diagnostics(config, model),
        *expert_diagnostics(config, options, text),
        *lora_diagnostics(config),
        *optimizer_diagnostics(config),
        *_weight_diagnostics(config),
    ]


def _weight_diagnostics(config: RunConfig) -> Iterator[Diagnostic]:
    """Find weights that mcore-bridge cannot read."""
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


def _hf_config(config: RunConfig) -> Mapping[str, Any]:
    """Return the Hugging Face config. Empty if there is none: the core's check of files reports that."""
    if config.model.path is None:
        return config.model.config or {}
    path = Path(config.model.path) / "config.json"
    model: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return model
