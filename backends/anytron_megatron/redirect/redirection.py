"""Switch the redirection on and off, and refuse CUDA features without a counterpart (queries about them work)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from anytron.base.errors import EngineError
from anytron_megatron.redirect import collectives, devices, modules, rng, streams, tensors
from anytron_megatron.redirect.substitution import Substitution, substitute

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
            "torch.cuda is already redirected.",
            why=f"its calls go to {_active.device_type}; a second redirection would hide the first",
            fix="call the function that the first redirect_torch_cuda() returned, which ends that redirection",
        )
    translate = devices.DeviceTranslator(runtime)
    undo_substitutions = substitute(
        [
            *devices.substitutions(runtime, translate),
            *tensors.substitutions(runtime, translate),
            *streams.substitutions(runtime),
            *rng.substitutions(runtime, translate),
            *collectives.substitutions(runtime),
            *modules.substitutions(),
            *_refusing_substitutions(),
        ]
    )
    _active = runtime

    def undo() -> None:
        global _active  # noqa: PLW0603
        undo_substitutions()
        _active = None

    return undo


# Names in torch.cuda, and the Megatron options that use them.
UNSUPPORTED = {
    "CUDAGraph": "leave enable_cuda_graph / cuda_graph_impl off",
    "graph": "leave enable_cuda_graph / cuda_graph_impl off",
    "MemPool": "leave nccl_ub and unified memory off",
    "ExternalStream": "leave high-priority and SHARP communicator streams off",
}


def _refusing_substitutions() -> Iterator[Substitution]:
    """Replace classes by ones that can be named in annotations and ``isinstance``, but not instantiated."""
    for name, fix in UNSUPPORTED.items():
        yield Substitution(torch.cuda, name, _refusing_class(name, fix))


def _refusing_class(name: str, fix: str) -> type:
    def __init__(*_: Any, **__: Any) -> None:  # noqa: N807 - becomes a constructor
        raise _no_counterpart(name, fix)

    kind = _NoGraphs if name == "CUDAGraph" else type
    return kind(name, (), {"__init__": __init__, "__module__": "torch.cuda"})


class _NoGraphs(type):
    """Answer Megatron's RNG tracker, which looks for this method before it keeps random states for CUDA graphs."""

    @property
    def register_generator_state(cls) -> NoReturn:
        raise _no_counterpart("CUDAGraph.register_generator_state", "leave use_cudagraphable_rng off")


def _no_counterpart(name: str, fix: str) -> EngineError:
    return EngineError(
        f"torch.cuda.{name} has no counterpart on this platform.",
        where="a call of torch.cuda, which Anytron redirects to the platform's device",
        why="only CUDA devices have this function",
        fix=fix,
    )
