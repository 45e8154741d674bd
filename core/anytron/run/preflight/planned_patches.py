"""Say which third-party code a run would change, by the installed versions. Imports and changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anytron.device.hooks.types import Role
    from anytron.device.loading import Session


def planned_patches(
    session: Session,
    roles: tuple[Role, ...] = ("trainer",),
    engine: str | None = None,
    rollout_engine: str | None = None,
) -> list[dict[str, Any]]:
    """Judge the patches that the plugins have for processes of ``roles``.

    Args:
        session: The plugins and the active platform.
        roles: The processes.
        engine: The training engine; None = the configuration's default.
        rollout_engine: The rollout engine; None = the configuration's default.

    Returns:
        JSON objects, see :meth:`anytron.device.patches.Judgement.as_json`; with more than one role, each also has the
        first ``role`` that the patch is for.

    Raises:
        PatchError: Two owners patch one target, or an id is used twice; a run would stop here too.
    """
    from anytron.config.generation import RolloutSection
    from anytron.config.running import EngineSection
    from anytron.device.hooks.types import PatchContext
    from anytron.device.patches import Ledger, Phase, plan

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
