"""Switch the redirection on and off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.base.errors import EngineError
from anytron_megatron.redirect import (
    collectives,
    devices,
    factories,
    memory,
    profiling,
    rng,
    streams,
    tensors,
    unsupported,
)
from anytron_megatron.redirect.substitution import substitute

if TYPE_CHECKING:
    from collections.abc import Callable

    from anytron.device.runtime import DeviceRuntime

_active: DeviceRuntime | None = None


def is_redirected() -> bool:
    """Whether ``torch.cuda`` is redirected in this process now."""
    return _active is not None


def redirect_torch_cuda(runtime: DeviceRuntime) -> Callable[[], None]:
    """Send everything that names ``torch.cuda`` or ``"cuda"`` to ``runtime``.

    It works with builds of torch with and without CUDA, and uses no real CUDA device while it is active.

    Returns:
        The function that ends the redirection and restores every attribute to the object that it was.

    Raises:
        EngineError: A redirection is active already.
    """
    global _active  # noqa: PLW0603 - the redirection is a state of the process, like torch.cuda itself
    if _active is not None:
        raise EngineError(
            "torch.cuda is redirected already.",
            why=f"it goes to {_active.device_type}; a second redirection would hide the first",
            fix="undo the first one",
        )
    translate = devices.DeviceTranslator(runtime)
    undo_substitutions = substitute(
        [
            *devices.substitutions(runtime, translate),
            *factories.substitutions(runtime, translate),
            *tensors.substitutions(runtime, translate),
            *streams.substitutions(runtime),
            *rng.substitutions(runtime, translate),
            *memory.substitutions(runtime),
            *profiling.substitutions(runtime),
            *collectives.substitutions(runtime),
            *unsupported.substitutions(),
        ]
    )
    _active = runtime

    def undo() -> None:
        global _active  # noqa: PLW0603
        undo_substitutions()
        _active = None

    return undo
