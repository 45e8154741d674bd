"""Apply a process's patches, phase by phase, as an engine is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.hooks.types import PatchContext

if TYPE_CHECKING:
    from anytron.engines.protocol import EngineContext
    from anytron.patches import Phase


def reach(phase: Phase, context: EngineContext, engine: str) -> None:
    """Apply the patches of a phase.

    They depend on the process alone: those of an earlier engine in it are in effect, and only held against what
    was imported since.

    Args:
        phase: The next one.
        context: Of the engine that is being built.
        engine: Its name.

    Raises:
        PatchError: A required patch cannot be applied.
    """
    if context.ledger.has_reached(phase):
        context.ledger.revalidate()
        return
    patch_context = PatchContext(context.platform, context.process.role, context.hooks, engine)
    context.ledger.apply(phase, context.hooks.patch_model(phase, patch_context))
