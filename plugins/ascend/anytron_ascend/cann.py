"""Ask the CANN runtime how many NPUs there are, through its C interface, without torch."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

from anytron_ascend import simulation

ACL_SUCCESS = 0
"""``ACL_SUCCESS`` of acl/acl_base.h."""


class CannError(Exception):
    """The CANN runtime cannot be loaded or refuses to answer."""


def device_nodes() -> list[str]:
    """The driver's device files, ``/dev/davinci0`` and so on."""
    nodes = Path("/dev").glob("davinci*")
    return sorted(str(node) for node in nodes if re.fullmatch(r"davinci\d+", node.name))


def device_count() -> int:
    """Count the NPUs that this process sees; none is initialised.

    ``aclrtGetDeviceCount`` needs no ``aclInit``; torch_npu calls it in the same way
    (torch_npu/csrc/core/npu/NPUFunctions.cpp).

    Raises:
        CannError: libascendcl.so cannot be loaded, or the call fails (usually because there is no driver).
    """
    simulation.preload()
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
