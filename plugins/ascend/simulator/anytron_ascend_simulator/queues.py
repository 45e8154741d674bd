"""Queue Python work on the simulated streams (``csrc/streams.cpp``).

With ``ANYTRON_ASCEND_SIMULATOR_ASYNCHRONOUS=1`` it is done when something waits for the stream. Without it nothing is
queued (:func:`asynchronous`).
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

FAILED = 507015
"""``ACL_ERROR_RT_AICORE_EXCEPTION``: what a stream reports whose work has failed."""

_RUN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_queued: dict[int, Callable[[], object]] = {}
_numbers = itertools.count(1)
_runtime: list[ctypes.CDLL] = []


def install(runtime: ctypes.CDLL) -> None:
    """Bind the queues of ``runtime``, libascendcl.so."""
    runtime.anytron_simulator_enqueue.argtypes = [ctypes.c_void_p, _RUN, ctypes.c_void_p]
    runtime.anytron_simulator_finish.argtypes = [ctypes.c_void_p]
    runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p
    _runtime.append(runtime)


def stop_at_exit() -> None:
    """Discard what is queued when the process ends; call it after importing torch_npu, whose exit waits for queues."""
    atexit.register(_runtime[0].anytron_simulator_stop)


def asynchronous() -> bool:
    """Whether work waits in queues."""
    return bool(_runtime[0].anytron_simulator_asynchronous())


def current_stream(device: torch.device) -> int:
    """Return the handle of a device's current stream."""
    import torch_npu

    return int(torch_npu._C._npu_getCurrentRawStream(device.index))


def enqueue(stream: int | None, work: Callable[[], object]) -> None:
    """Queue ``work`` on a stream (None = the default stream); if it raises, waiting for the stream fails."""
    number = next(_numbers)
    _queued[number] = work
    _runtime[0].anytron_simulator_enqueue(stream, _callback, number)


def finish(stream: int) -> None:
    """Do everything that is queued on a stream.

    Raises:
        RuntimeError: Some of it failed.
    """
    if _runtime[0].anytron_simulator_finish(stream):
        raise RuntimeError(_runtime[0].aclGetRecentErrMsg().decode())


def finish_all() -> None:
    """Do everything that is queued anywhere."""
    _runtime[0].anytron_simulator_finish_all()


def _run(number: int) -> int:
    work = _queued.pop(number)
    try:
        # The modes of the thread that waits, such as torch.device, are not meant for the work.
        with (
            torch._C._AutoDispatchBelowAutograd(),
            torch._C._DisableTorchDispatch(),
            torch._C.DisableTorchFunction(),
            torch.no_grad(),
        ):
            work()
    except BaseException as error:  # noqa: BLE001 - an exception cannot cross C
        _runtime[0].anytron_simulator_set_message(f"{type(error).__name__}: {error}".encode())
        return FAILED
    return 0


_callback = _RUN(_run)
