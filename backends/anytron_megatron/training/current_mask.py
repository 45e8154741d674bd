"""The mask of the micro-batch that is being computed, for layers that Megatron hands no mask to.

Megatron's blocks pass attention masks on, and nothing else: the map of real tokens that recurrent
layers need has no way through them, least of all to later pipeline stages. It stands here instead,
set by the micro-batch's scope (:mod:`anytron.sequences.scopes`), so that a recomputation of one
micro-batch never sees the mask of another.
"""

from __future__ import annotations

import contextlib
import contextvars
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.masks import AttnMask
    from anytron.sequences.scopes import ScopeFactory

_current: contextvars.ContextVar[AttnMask | None] = contextvars.ContextVar("anytron_megatron_mask", default=None)


def scope_of(mask: AttnMask) -> ScopeFactory:
    """Make scopes within which :func:`current_mask` answers ``mask``."""

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        token = _current.set(mask)
        try:
            yield
        finally:
            _current.reset(token)

    return scope


def current_mask() -> AttnMask | None:
    """The platform's mask for the micro-batch whose forward pass, or recomputation, is running here."""
    return _current.get()
