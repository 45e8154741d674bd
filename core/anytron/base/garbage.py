"""Python's collector of cyclic garbage.

A full collection looks at every object of a process: with torch, Megatron and transformers it takes 0.1 to 0.5 s.
Without this module a process makes about seven of them while it imports, and then one every few steps.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def no_collections() -> Iterator[None]:
    """Collect nothing in the block. It is for work that makes many objects and little garbage, such as imports."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def exempt_objects() -> None:
    """Collect all garbage, and exempt the objects that remain from collections.

    Call it when all that a process keeps for long is in place. An exempt object is freed when the last reference to it
    goes, but exempt objects that refer to each other stay until :func:`collect_all`.
    """
    collect_all()
    gc.freeze()
    _Exemption.made = True


def collect_all() -> None:
    """Collect all garbage. Afterwards no object is exempt from collections."""
    gc.unfreeze()
    _Exemption.made = False
    gc.collect()


@contextmanager
def no_exemptions() -> Iterator[None]:
    """Let :func:`gc.get_referrers` see what :func:`exempt_objects` has exempted.

    If any objects were exempt, all objects are exempt after the block, also garbage that has not been collected.
    """
    made = _Exemption.made
    if made:
        gc.unfreeze()
    try:
        yield
    finally:
        if made:
            gc.freeze()


class _Exemption:
    made = False
    """Whether :func:`exempt_objects` has exempted objects: others may have, before Anytron was imported."""
