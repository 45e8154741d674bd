"""Recomputation and random states, as Megatron imports them."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from anytron_megatron.portable_te.refusals import refuse, refuse_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed import ProcessGroup


@contextlib.contextmanager
def activation_recompute_forward(activation_recompute: bool = False, recompute_phase: bool = False) -> Iterator[None]:
    """Mark a region that is recomputed. Transformer Engine restores FP8 scales there; this package has no scales."""
    del activation_recompute, recompute_phase
    yield


def is_fp8_activation_recompute_enabled() -> bool:
    """Return False: there are no FP8 scales to restore."""
    return False


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: ProcessGroup | None = None,
    use_reentrant: bool = True,
    context_fn: Any = None,
    determinism_check: str = "default",
    debug: bool = False,
    **kwargs: Any,
) -> Any:
    """Recompute ``function`` in the backward pass, by Megatron's own checkpointing, which is reentrant.

    ``get_rng_state_tracker`` and ``tp_group`` are ignored, because Megatron's function itself forks its random states
    and knows the tensor-parallel group. The arguments after them are for recomputation that is not reentrant.

    Raises:
        EngineError: Recomputation that is not reentrant is asked for.
    """
    del get_rng_state_tracker, tp_group
    if not use_reentrant:
        refuse("checkpoint", "recomputation with use_reentrant=False", "leave this setting at its default, True")
    check = None if determinism_check == "default" else determinism_check
    refuse_settings("checkpoint", {"context_fn": context_fn, "determinism_check": check, "debug": debug})
    # Megatron imports this module, so it cannot be imported above.
    from megatron.core import tensor_parallel

    call = functools.partial(function, **kwargs) if kwargs else function
    return tensor_parallel.checkpoint(call, distribute_saved_activations, *args)


class CudaRNGStatesTracker:
    """Base class of one of Megatron's random-state trackers; creating an instance is refused.

    In Transformer Engine, this class keeps random states that CUDA graphs can capture.
    """

    def __init__(self) -> None:
        refuse("CudaRNGStatesTracker", "random states for CUDA graphs", "set te_rng_tracker to false")
