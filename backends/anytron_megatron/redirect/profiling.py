"""Turn NVTX ranges into ranges of the runtime's own profiler."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from anytron_megatron.redirect.substitution import Substitution

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from anytron.device.runtime import DeviceRuntime


def substitutions(runtime: DeviceRuntime) -> Iterator[Substitution]:
    """Replace nested ranges and marks of ``torch.cuda.nvtx``; each thread has its own nesting."""
    nesting = threading.local()

    def open_ranges() -> list[AbstractContextManager[None]]:
        ranges: list[AbstractContextManager[None]] = vars(nesting).setdefault("ranges", [])
        return ranges

    def range_push(msg: str) -> int:
        scope = runtime.profiler_range(msg)
        scope.__enter__()
        open_ranges().append(scope)
        return len(open_ranges()) - 1

    def range_pop() -> int:
        if not open_ranges():
            return -1  # as NVTX itself answers
        open_ranges().pop().__exit__(None, None, None)
        return len(open_ranges())

    @contextmanager
    def range(msg: str, *args: Any, **kwargs: Any) -> Iterator[None]:  # noqa: A001 - takes nvtx.range's place
        range_push(msg.format(*args, **kwargs))
        try:
            yield
        finally:
            range_pop()

    def mark(msg: str) -> None:
        with runtime.profiler_range(msg):
            pass

    for substitute in (range_push, range_pop, range, mark):
        yield Substitution(torch.cuda.nvtx, substitute.__name__, substitute)
