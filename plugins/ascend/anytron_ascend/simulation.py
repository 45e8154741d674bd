"""The one place that knows of the simulator: a test tool, used only where the environment asks for it."""

from __future__ import annotations

import os

from anytron import PlatformError

VARIABLE = "ANYTRON_ASCEND_SIMULATOR"


def preload() -> None:
    """Load simulated CANN libraries instead of the real ones, if asked for; imports neither torch nor torch_npu.

    Raises:
        PlatformError: The simulator is not installed, not built, or not for this torch_npu.
    """
    _run("preload")


def activate() -> None:
    """Import torch_npu on simulated devices, if asked for."""
    _run("activate")


def _run(step: str) -> None:
    if os.environ.get(VARIABLE) != "1":
        return
    try:
        import anytron_ascend_simulator as simulator
    except ImportError as error:
        raise PlatformError(
            "The Ascend simulator is not installed.",
            where=f"{VARIABLE}=1",
            why=str(error),
            fix=f"pip install anytron-ascend-simulator, or unset {VARIABLE}",
        ) from error
    try:
        getattr(simulator, step)()
    except simulator.SimulatorError as error:
        raise PlatformError("The Ascend simulator cannot be used.", where=f"{VARIABLE}=1", why=str(error)) from error
