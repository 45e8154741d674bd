"""The Megatron backend as a plugin: what it requires, checks, sets and patches. Imports no Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.device.hooks.specs import hookimpl
from anytron.device.hooks.types import Requirement
from anytron_megatron.checks.run import run_diagnostics
from anytron_megatron.checks.training import NO_NONDETERMINISTIC_ALGORITHM
from anytron_megatron.models.release import SUPPORTED
from anytron_megatron.options import ENGINE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from anytron.config.diagnostics import Diagnostic
    from anytron.config.schema import RunConfig
    from anytron.device.hooks.types import PatchContext, ProcessInfo
    from anytron.device.patches import Patch, Phase

_INSTALL = "pip install anytron, which replaces versions outside of the range, or install the version in constraints/"


class MegatronBackend:
    """Entry point ``megatron`` of the group ``anytron.plugins``."""

    @hookimpl
    def requirements(self, engine: str | None) -> Iterable[Requirement]:
        """Return the engine's libraries, with the version ranges of its patches and tests."""
        if engine not in (None, ENGINE):
            return ()  # an engine made of this one's parts has requirements of its own
        return (
            Requirement("torch", ">=2.6", _INSTALL),
            Requirement("megatron-core", SUPPORTED, _INSTALL),
            Requirement("mcore-bridge", ">=1.6.5,<1.7", _INSTALL),
            Requirement("peft", ">=0.19,<0.21", _INSTALL),
            Requirement("transformers", ">=5.0,<6", _INSTALL),
            Requirement("pillow", ">=10", "pip install pillow: mcore-bridge imports it without declaring it"),
        )

    @hookimpl
    def configure(self, config: RunConfig) -> Iterable[Diagnostic]:
        """Find settings that Megatron would refuse only after minutes, or with which it would compute wrongly."""
        return run_diagnostics(config) if config.engine.name == ENGINE else ()

    @hookimpl
    def runtime_env(self, process: ProcessInfo, config: RunConfig) -> Mapping[str, str]:
        """In training ranks, keep tokenizers from starting threads, and set the variables of deterministic runs."""
        if process.role != "trainer":
            return {}
        deterministic = config.engine.name == ENGINE and config.engine.deterministic
        return {"TOKENIZERS_PARALLELISM": "false", **(NO_NONDETERMINISTIC_ALGORITHM if deterministic else {})}

    @hookimpl
    def patch_model(self, phase: Phase, context: PatchContext) -> Iterable[Patch]:
        """Return Megatron's patches, for training ranks only."""
        if context.role != "trainer":
            return []
        from anytron_megatron.patches import trainer_patches

        return trainer_patches(phase, context)
