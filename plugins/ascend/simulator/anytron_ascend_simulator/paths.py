"""Where the simulator's libraries lie, and for which torch_npu they were built."""

from __future__ import annotations

import hashlib
import os
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

SUPPORTED = ("2.13.0",)
"""Versions of torch_npu whose headers and undefined symbols the sources here were written against."""

SOURCES = Path(__file__).parent / "csrc"

LIBRARIES = (
    "ascendcl",
    "hccl",
    "acl_op_compiler",
    "ge_runner",
    "graph",
    "acl_tdt_channel",
    "fmk_parser",
    "ascend_protobuf",
    "opapi",
)
"""What torch_npu links against or opens, in the order in which they must be loaded."""


class SimulatorError(RuntimeError):
    """The simulator cannot be built or used; the text says why and what to do."""


def torch_npu_version() -> str:
    """The installed torch_npu's version.

    Raises:
        SimulatorError: It is not installed, or not one that the simulator knows.
    """
    try:
        found = version("torch-npu")
    except PackageNotFoundError:
        raise SimulatorError(
            f"The simulator runs the real torch_npu, which is not installed: pip install torch-npu=={SUPPORTED[-1]}"
        ) from None
    if found not in SUPPORTED:
        raise SimulatorError(
            f"The simulator knows torch_npu {', '.join(SUPPORTED)}, and {found} is installed. Another version has "
            f"other headers and other symbols: pip install torch-npu=={SUPPORTED[-1]}"
        )
    return found


def package_directory(name: str) -> Path:
    """Find an installed package's directory without importing it."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise SimulatorError(f"The package {name} is not installed.")
    return Path(spec.origin).parent


def library_directory() -> Path:
    """Where the libraries for the installed torch_npu and these sources are, or will be.

    ``ANYTRON_ASCEND_SIMULATOR_DIR``, or a directory under the user's cache; its name follows from the
    version and the sources, so that stale libraries are never used.
    """
    digest = hashlib.sha256(torch_npu_version().encode())
    here = Path(__file__)
    for source in sorted(
        [*SOURCES.iterdir(), *(here.with_name(f"{name}.py") for name in ("build", "signatures"))]
    ):
        digest.update(source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = os.environ.get("ANYTRON_ASCEND_SIMULATOR_DIR") or cache / "anytron" / "ascend-simulator"
    return Path(root) / f"torch_npu-{torch_npu_version()}-{digest.hexdigest()[:12]}"


def library_paths() -> list[Path]:
    """The libraries, in loading order."""
    return [library_directory() / f"lib{name}.so" for name in LIBRARIES]
