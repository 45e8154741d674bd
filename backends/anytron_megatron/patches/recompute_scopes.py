"""Run recomputed functions inside the scope of their own micro-batch (:mod:`anytron.sequences.scopes`).

In a pipeline schedule the backward pass of micro-batch i may run while micro-batch j is the current one,
and on a thread of autograd's. Megatron has three ways to recompute. Each takes the function to run again, and
these wrappers tie that function to its scope.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from anytron.sequences.scopes import rescoped

if TYPE_CHECKING:
    from collections.abc import Callable


def rescope_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``checkpoint(function, ...)`` and ``te_checkpoint(forward_func, ...)``."""

    @functools.wraps(original)
    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(rescoped(function), *args, **kwargs)

    return checkpoint


def rescope_method(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``CheckpointWithoutOutput.checkpoint(self, run_function, ...)``."""

    @functools.wraps(original)
    def checkpoint(self: Any, run_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(self, rescoped(run_function), *args, **kwargs)

    return checkpoint
