"""Anytron: reinforcement-learning training of language models on Megatron-Core, on any accelerator.

For authors of platforms and of other plugins::

    from anytron import Platform, hookimpl

    class MyChip(Platform):          # entry point group ``anytron.platforms``
        name = "mychip"
        api_version = 1

        @hookimpl
        def attention_kernel(self, spec): ...

Importing this package imports no other module, because ``python -m anytron`` imports it while the current directory is
still first on ``sys.path``: a file there could take the place of a module of the standard library.
"""

TYPE_CHECKING = False  # the constant of typing, without importing it
if TYPE_CHECKING:
    from anytron.base.errors import (
        AnytronError,
        ConfigError,
        DataError,
        EngineError,
        HookContractError,
        PatchError,
        PlatformError,
        PluginError,
        did_you_mean,
    )
    from anytron.base.traits import ModelTraits, ParallelSizes
    from anytron.base.version import __version__
    from anytron.config.diagnostics import Diagnostic
    from anytron.config.schema import RunConfig, default_run
    from anytron.config.section import Section
    from anytron.device.hooks.specs import hookimpl
    from anytron.device.hooks.types import ConfigEdit, PatchContext, ProcessInfo, Requirement, Role
    from anytron.device.host_collectives import host_collectives
    from anytron.device.loading import hooks_of
    from anytron.device.loading.neutral import NeutralDefaults
    from anytron.device.patches import Installed, Ledger, Patch, Phase, Supersession
    from anytron.device.platform import (
        Availability,
        Decision,
        EngineFacts,
        Feature,
        LayoutRequest,
        Limit,
        PeakFlops,
        Platform,
        Probe,
    )
    from anytron.device.runtime import AcceleratorRuntime, DeviceRuntime, MemoryStats
else:

    def __getattr__(name: str) -> object:
        from anytron.base.lazy import find

        return find(__name__, name)


__all__ = [
    "AcceleratorRuntime",
    "AnytronError",
    "Availability",
    "ConfigEdit",
    "ConfigError",
    "DataError",
    "Decision",
    "DeviceRuntime",
    "Diagnostic",
    "EngineError",
    "EngineFacts",
    "Feature",
    "HookContractError",
    "Installed",
    "LayoutRequest",
    "Ledger",
    "Limit",
    "MemoryStats",
    "ModelTraits",
    "NeutralDefaults",
    "ParallelSizes",
    "Patch",
    "PatchContext",
    "PatchError",
    "PeakFlops",
    "Phase",
    "Platform",
    "PlatformError",
    "PluginError",
    "Probe",
    "ProcessInfo",
    "Requirement",
    "Role",
    "RunConfig",
    "Section",
    "Supersession",
    "__version__",
    "default_run",
    "did_you_mean",
    "hookimpl",
    "hooks_of",
    "host_collectives",
]
