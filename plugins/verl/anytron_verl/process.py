"""The layer of a process that has imported verl."""

from __future__ import annotations

import json
import os
from pathlib import Path

from anytron.errors import EngineError
from anytron.layer import Layer, open_layer
from anytron_verl.names import REPORT

_layer: Layer | None = None


def begin() -> Layer:
    """Open the layer of this process, once: its platform is that of ``ANYTRON_PLATFORM``, else the one that is usable.

    Raises:
        AnytronError: Its platform cannot be used, or Megatron is imported already.
    """
    global _layer  # noqa: PLW0603 - the layer is a state of the process, as what it patches is
    _layer = _layer or open_layer()
    return _layer


def layer() -> Layer:
    """Return the layer of this process.

    Raises:
        EngineError: There is none.
    """
    if _layer is None:
        raise EngineError(
            "verl runs without Anytron in this process.",
            why="its plugin was not loaded, or has failed",
            fix="anytron doctor says why; VERL_USE_EXTERNAL_PLUGINS must not leave it out",
        )
    return _layer


def write_report() -> None:
    """Write the ledger to ``patches-PID.json`` if :data:`REPORT` asks for it: nobody can ask a Ray worker."""
    if directory := os.environ.get(REPORT):
        path = Path(directory) / f"patches-{os.getpid()}.json"
        path.write_text(json.dumps(layer().ledger.report(), indent=1) + "\n", encoding="utf-8")


def stop() -> None:
    """Undo all patches: ``torch.cuda`` is torch's again. Engines that were built are not for use afterwards.

    Raises:
        PatchError: Someone else has changed a target since; all others are undone.
    """
    global _layer  # noqa: PLW0603
    if _layer is not None:
        _layer.undo()
        _layer = None
