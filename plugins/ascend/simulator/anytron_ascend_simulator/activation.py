"""Load the simulator instead of CANN in this process."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import sys
from types import ModuleType
from typing import Any

from anytron_ascend_simulator.build import SimulatorError, library_paths


def install_pyacl(runtime: ctypes.CDLL) -> None:
    """Make ``import acl`` find pyACL, CANN's Python interface, which no package registry has.

    ``runtime`` is the simulated libascendcl.so.
    """
    sys.modules["acl"] = _PyAcl(runtime)


class _PyAcl(ModuleType):
    def __init__(self, runtime: ctypes.CDLL) -> None:
        super().__init__("acl", "Simulated.")
        self._soc_name = runtime.aclrtGetSocName
        self._soc_name.restype = ctypes.c_char_p

    def get_soc_name(self) -> str:
        """Return the name of the simulated chip."""
        return str(self._soc_name().decode())

    def __getattr__(self, name: str) -> Any:
        # AttributeError, so that hasattr works and __spec__ and its like are simply absent.
        raise AttributeError(f"the Ascend simulator has no acl.{name}: of pyACL it has get_soc_name only")


VARIABLE = "ANYTRON_ASCEND_SIMULATOR"
ASYNCHRONOUS = "ANYTRON_ASCEND_SIMULATOR_ASYNCHRONOUS"
_ENVIRONMENT = {
    # Importing torch would load torch_npu before the simulated libraries are there.
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    # torch_npu's queue would run kernels on another thread, after their tensors' memory has been reused.
    "TASK_QUEUE_ENABLE": "0",
}
_NO_HOME = "Warning: ASCEND_HOME_PATH environment variable is not set.\n"
_loaded: list[ctypes.CDLL] = []
_activated = False


def preload() -> None:
    """Load the simulated CANN libraries, so that later requests for the real ones find the simulated ones.

    Imports neither torch nor torch_npu; prints to stderr that the simulator is active. A second call does nothing.

    Raises:
        SimulatorError: The environment does not ask for the simulator, it is not built, torch_npu is not
                installed or has an unknown version, or torch_npu has been imported before.
    """
    if _loaded:
        return
    if os.environ.get(VARIABLE) != "1":
        raise SimulatorError(f"The simulator is used only where the environment asks for it: set {VARIABLE}=1.")
    if "torch_npu" in sys.modules:
        raise SimulatorError(
            "torch_npu was imported before the simulator: call anytron_ascend_simulator.preload() before that import."
        )
    if os.environ.get(ASYNCHRONOUS) not in (None, "", "0", "1"):
        raise SimulatorError(f"{ASYNCHRONOUS} is {os.environ[ASYNCHRONOUS]!r}: set it to 1 or 0.")
    paths = library_paths()
    if not all(path.is_file() for path in paths):
        raise SimulatorError(
            "The simulator is not built for this torch_npu: run python -m anytron_ascend_simulator build"
        )
    os.environ.update(_ENVIRONMENT)
    _loaded.extend(ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) for path in paths)
    print("*** Ascend simulator: no NPU is used; results come from the CPU, speed means nothing ***", file=sys.stderr)


def activate() -> None:
    """Make ``torch.npu`` a simulated device; a second call does nothing.

    Calls :func:`preload`, imports torch_npu, and installs its kernels.
    """
    global _activated  # noqa: PLW0603 - a process has one runtime
    if _activated:
        return
    preload()
    from anytron_ascend_simulator import aclnn, queues

    queues.install(_loaded[0])
    install_pyacl(_loaded[0])
    aclnn.install(next(library for library in _loaded if library._name.endswith("libopapi.so")), _loaded[0])
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        import torch_npu  # noqa: F401 - registers the device
    # There is no CANN that could have a home.
    print(said.getvalue().replace(_NO_HOME, ""), end="")

    queues.stop_at_exit()
    from anytron_ascend_simulator import aten

    aten.install()
    _activated = True
