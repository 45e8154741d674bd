"""Query CANN for the number of NPUs and for operators, through its C interface; or load the simulator instead."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from anytron import PlatformError

if TYPE_CHECKING:
    from collections.abc import Iterator


SIMULATOR = "ANYTRON_ASCEND_SIMULATOR"
"""Environment variable that asks for the simulator, a test tool, if its value is 1."""

ACL_SUCCESS = 0
"""``ACL_SUCCESS`` of acl/acl_base.h."""

OPERATORS = ("libopapi_transformer.so", "libopapi.so")
"""Libraries that may hold the operators for transformers; only the first one that CANN has is searched."""


class CannError(Exception):
    """The CANN runtime cannot be loaded or refuses to answer."""


def device_nodes() -> list[str]:
    """The driver's device files, ``/dev/davinci0`` and so on."""
    nodes = Path("/dev").glob("davinci*")
    return sorted(str(node) for node in nodes if re.fullmatch(r"davinci\d+", node.name))


def device_count() -> int:
    """Count the NPUs that this process sees, without initialising any.

    ``aclrtGetDeviceCount`` needs no ``aclInit``; torch_npu calls it in the same way
    (torch_npu/csrc/core/npu/NPUFunctions.cpp).

    Raises:
        CannError: libascendcl.so cannot be loaded, or the call fails (usually because there is no driver).
    """
    preload_simulator()
    try:
        library = ctypes.CDLL("libascendcl.so")
        ask = library.aclrtGetDeviceCount
    except (OSError, AttributeError) as error:
        raise CannError(str(error)) from error
    count = ctypes.c_uint32(0)
    status = ask(ctypes.byref(count))
    if status != ACL_SUCCESS:
        raise CannError(f"aclrtGetDeviceCount failed with error {status}")
    return count.value


@functools.cache
def has_operator(name: str) -> bool:
    """Whether CANN has an operator, by the name of its C function; False without CANN. No NPU is initialised.

    torch_npu looks for operators in the same way (op-plugin, op_plugin/utils/op_api_common.h).
    """
    preload_simulator()
    return any(hasattr(library, name) for library in _operator_libraries())


def preload_simulator() -> None:
    """Load simulated CANN libraries instead of CANN, if :data:`SIMULATOR` is 1; imports neither torch nor torch_npu.

    Raises:
        PlatformError: The simulator is not installed, not built, or not for this torch_npu.
    """
    _call_simulator("preload")


def activate_simulator() -> None:
    """Import torch_npu on simulated devices, if :data:`SIMULATOR` is 1."""
    _call_simulator("activate")


def _call_simulator(step: str) -> None:
    if os.environ.get(SIMULATOR) != "1":
        return
    try:
        import anytron_ascend_simulator as simulator
    except ImportError as error:
        raise PlatformError(
            "The Ascend simulator is not installed.",
            where=f"{SIMULATOR}=1",
            why=str(error),
            fix=f"pip install anytron-ascend-simulator, or unset {SIMULATOR}",
        ) from error
    try:
        getattr(simulator, step)()
    except simulator.SimulatorError as error:
        raise PlatformError(
            "The Ascend simulator cannot be used.",
            where=f"{SIMULATOR}=1",
            why=str(error),
            fix=f"remove the cause, or unset {SIMULATOR} to use NPUs",
        ) from error


def _operator_libraries() -> Iterator[ctypes.CDLL]:
    for name in OPERATORS:
        with contextlib.suppress(OSError):  # it is not there
            yield ctypes.CDLL(name)
            return
