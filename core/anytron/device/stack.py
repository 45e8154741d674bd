"""The device stack alone (plugins, platform, patches), for Anytron's workers and for trainers of other frameworks.

``docs/how-to/use-in-your-own-trainer.md`` is a complete example with a Megatron model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anytron.base.errors import ConfigError
from anytron.config.generation import RolloutSection
from anytron.config.running import EngineSection
from anytron.device.hooks.types import OWN_TRAINER, PatchContext
from anytron.device.loading import open_session
from anytron.device.patches import Ledger, Phase, plan
from anytron.device.platform import declined

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from typing_extensions import Self

    from anytron.device.hooks.facade import Hooks
    from anytron.device.hooks.types import Role
    from anytron.device.loading import Session
    from anytron.device.patches import Patch, PatchRecord
    from anytron.device.platform import EngineFacts, Feature, Platform


@dataclass(frozen=True)
class DeviceStack:
    """The plugins, the platform and the patches of third-party code of this process.

    Leaving it as a context manager undoes all patches.

    Attributes:
        session: The plugins and the active platform.
        ledger: The patches of this process.
    """

    session: Session
    ledger: Ledger

    @property
    def hooks(self) -> Hooks:
        """The facade over all plugins."""
        return self.session.hooks

    @property
    def platform(self) -> Platform:
        """The active platform."""
        return self.session.platform

    def apply_phase(self, phase: Phase, patches: Iterable[Patch] = ()) -> list[PatchRecord]:
        """Apply the plugins' patches of a phase, and further patches of the caller.

        Patches depend on the process alone, not on the engine. If an earlier engine of this process has applied the
        phase already, only ``patches`` that the ledger does not know yet are applied, and patches that other code has
        overwritten since are applied again (:meth:`Ledger.revalidate`).

        Raises:
            PatchError: A required patch cannot be applied; a ``before_import`` patch comes after the import of its
                package; a new patch comes after its phase; or an overwritten patch cannot be applied again.
        """
        if not self.ledger.has_reached(phase):
            return self.ledger.apply(phase, [*self.hooks.patch_model(phase, self.ledger.context), *patches])
        new = [patch for patch in patches if not self.ledger.knows(patch)]
        return self.ledger.apply(phase, new) if new else self.ledger.revalidate()

    def prepare(self, facts: EngineFacts) -> None:
        """Let the platform set this process's global state for a training engine, before its process groups exist."""
        self.platform.prepare_engine(facts, self.ledger)

    def require(self, asked: Iterable[Feature]) -> None:
        """Raise an error if the platform lacks one of the features, as ``anytron train`` does before a run.

        Raises:
            ConfigError: The platform lacks a feature; the error has the platform's reason.
            HookContractError: The platform's ``limits()`` returned something other than limits.
        """
        if refused := declined(self.platform, asked):
            raise ConfigError(
                "The platform does not support this model.",
                where=f"platform {self.platform.name}",
                why="; ".join(refused.values()),
                fix="change the model, the parallel sizes or the sequence format (thd, bshd), or use another platform",
            )

    def undo(self) -> None:
        """Undo all patches, the last one first; afterwards ``torch.cuda`` is torch's own again.

        Modules that were imported stay imported, and devices of other platforms stay hidden.

        Raises:
            PatchError: Other code has changed a target since; all other patches are undone.
        """
        self.ledger.undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()


def open_device_stack(
    platform: str | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    role: Role = "trainer",
    engine: str = OWN_TRAINER,
) -> DeviceStack:
    """Choose the platform of this process, and apply the patches that come before Megatron is imported.

    Args:
        platform: Name of the platform; None = ``ANYTRON_PLATFORM``, else the one whose device is usable.
        options: ``platform.options``; None = ``ANYTRON_PLATFORM_OPTIONS``.
        role: Kind of process; it determines which patches apply.
        engine: Name of Anytron's engine whose models the process builds; default: the process builds its own models.

    Raises:
        PlatformError: The platform cannot be used; or no platform is named, and the probes leave no single choice.
        PluginError: An installed plugin cannot be loaded.
        ConfigError: ``options`` are not valid for the platform, or differ from ``ANYTRON_PLATFORM_OPTIONS``.
        PatchError: Megatron, or another package that must be patched before its import, is imported already.
    """
    return enter_device_stack(open_session(platform, options, engine), role, engine)


def enter_device_stack(session: Session, role: Role, engine: str) -> DeviceStack:
    """Apply the patches that come before Megatron is imported, in a process whose session is open.

    Args and raises: As :func:`open_device_stack`.
    """
    ledger = Ledger(context=PatchContext(session.platform, role, session.hooks, engine))
    stack = DeviceStack(session, ledger)
    stack.apply_phase(Phase.BEFORE_IMPORT)
    return stack


def planned_patches(
    session: Session,
    roles: tuple[Role, ...] = ("trainer",),
    engine: str | None = None,
    rollout_engine: str | None = None,
) -> list[dict[str, Any]]:
    """Return which third-party code processes of ``roles`` would patch here; imports and changes nothing.

    Args:
        session: The plugins and the active platform.
        roles: Kinds of processes.
        engine: The training engine; None = the configuration's default.
        rollout_engine: The rollout engine; None = the configuration's default.

    Returns:
        JSON objects, see :meth:`anytron.device.patches.Judgement.as_json`. If there are several roles, each object also
        has a ``role``, the first role in which the patch would be applied.

    Raises:
        PatchError: Two owners patch one target, or an id is used twice; a run would stop here too.
    """
    training, rollout = engine or EngineSection().name, rollout_engine or RolloutSection().engine
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for role in roles:
        context = PatchContext(session.platform, role, session.hooks, training if role == "trainer" else rollout)
        patches = [patch for phase in Phase for patch in session.hooks.patch_model(phase, context)]
        Ledger(patches)  # finds conflicts
        for judgement in plan(patches):
            row = judgement.as_json() if len(roles) == 1 else {**judgement.as_json(), "role": role}
            rows.setdefault((row["id"], row["target"]), row)
    return list(rows.values())
