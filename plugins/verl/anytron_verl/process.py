"""Set up the platform, its hooks and its patches in a process that has imported verl."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytron import EngineError
from anytron.train import DeviceStack, open_device_stack
from anytron_verl import REPORT

if TYPE_CHECKING:
    from collections.abc import Callable

_stack: DeviceStack | None = None
_told = ExitStack()


def begin() -> DeviceStack:
    """Open the device stack of this process, once.

    ``ANYTRON_PLATFORM`` names its platform; without it, the only usable platform is taken. ``ANYTRON_PLATFORM_OPTIONS``
    gives the platform's options.

    Raises:
        AnytronError: The platform cannot be used, or Megatron is imported already.
    """
    global _stack  # noqa: PLW0603 - the device stack is a state of the process, as what it patches is
    _stack = _stack or open_device_stack()
    return _stack


def stack() -> DeviceStack:
    """Return the device stack of this process.

    Raises:
        EngineError: No device stack was opened.
    """
    if _stack is None:
        raise EngineError(
            "verl runs without Anytron in this process.",
            why="Anytron's plugin for verl was not loaded, or it failed",
            fix="run anytron doctor to see why; VERL_USE_EXTERNAL_PLUGINS must include the plugin",
        )
    return _stack


def write_report() -> None:
    """Write the ledger to ``patches-PID.json`` if :data:`REPORT` asks for it: a Ray worker has no console."""
    if directory := os.environ.get(REPORT):
        path = Path(directory) / f"patches-{os.getpid()}.json"
        path.write_text(json.dumps(stack().ledger.report(), indent=1) + "\n", encoding="utf-8")


def at_stop(undo: Callable[..., object], *arguments: Any) -> None:
    """Register a function that :func:`stop` calls; it undoes what other code has registered in verl."""
    _told.callback(undo, *arguments)


def stop() -> None:
    """Undo all patches and registrations: ``torch.cuda`` is torch's again, and verl will look for another platform.

    Engines that were built must not be used afterwards.

    Raises:
        PatchError: Other code has changed a target since; all other patches are undone.
    """
    global _stack
    _told.close()
    opened, _stack = _stack, None
    if opened is not None:
        opened.undo()
