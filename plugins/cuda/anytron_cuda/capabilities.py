"""The libraries and the GPU of this machine, as plain data, and the choice of the best implementation for them."""

from __future__ import annotations

import functools
import importlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from anytron_cuda.environment import has_compiler
from anytron_cuda.modules import import_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


DISTRIBUTIONS = MappingProxyType(
    {
        "flash_attn": "flash-attn",
        "flash_attn_interface": "flash-attn-3",
        "liger_kernel": "liger-kernel",
        "transformer_engine": "transformer-engine",
        "triton": "triton",
    }
)
"""Libraries of kernels: the name that is imported, and the distribution that has its version."""

NEUTRAL = "neutral"
"""Name of the reference kernels of :mod:`anytron.kernels`, plain torch operations."""


@dataclass(frozen=True)
class Capabilities:
    """A GPU and the libraries that can compute on it.

    Attributes:
        compute_capability: (major, minor) of the GPU, for example (9, 0) for Hopper.
        torch: Version of torch.
        libraries: Versions of the importable :data:`DISTRIBUTIONS`, by import name.
        broken: Installed libraries that cannot be imported, for example because they were built for another torch:
            import name and error message.
    """

    compute_capability: tuple[int, int]
    torch: Version
    libraries: Mapping[str, Version] = field(default_factory=lambda: MappingProxyType({}))
    broken: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def has(self, library: str, minimum: str = "0") -> bool:
        """Whether a library can be imported, in this version or a later one."""
        return self.missing(library, minimum) is None

    def missing(self, library: str, minimum: str = "0") -> str | None:
        """Return why a library cannot be used in this version or a later one; None if it can."""
        name, found = DISTRIBUTIONS[library], self.libraries.get(library)
        if library in self.broken:
            return f"{name} cannot be imported: {self.broken[library]}"
        if found is None:
            return f"{name} is not installed"
        return f"{name} {found} is older than {minimum}" if found < Version(minimum) else None


@functools.cache
def capabilities() -> Capabilities:
    """Examine the current GPU, which initialises CUDA, and import the libraries; for processes that use it."""
    import torch

    found = {module: _imported(module) for module in DISTRIBUTIONS}
    return Capabilities(
        compute_capability=torch.cuda.get_device_capability(),
        torch=Version(torch.__version__),
        libraries=MappingProxyType({name: what for name, what in found.items() if isinstance(what, Version)}),
        broken=MappingProxyType({name: what for name, what in found.items() if isinstance(what, str)}),
    )


def broken_libraries() -> dict[str, str]:
    """Find installed libraries that cannot be imported, by imports in other processes: distribution and error message.

    Transformer Engine is not among them; :mod:`anytron_cuda.modules` handles it.
    """
    tried = {name: module for module, name in DISTRIBUTIONS.items() if module != "transformer_engine"}
    installed = {name: module for name, module in tried.items() if _is_installed(name)}
    with ThreadPoolExecutor() as pool:  # each waits for a process, which takes seconds
        errors = dict(zip(installed, pool.map(import_error, installed.values()), strict=True))
    return {name: error for name, error in errors.items() if error}


def _is_installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def _imported(module: str) -> Version | str | None:
    """Return a library's version, or why it cannot be used (a string); None if it is not installed."""
    try:
        found = Version(version(DISTRIBUTIONS[module]))
        if importlib.import_module(module).__name__ != module:
            return None  # the portable modules have taken the name of Transformer Engine
        if module == "triton" and not has_compiler(os.environ):
            return "it needs a C compiler and Python's headers to start a kernel, and they are missing"
    except PackageNotFoundError:
        return None
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        # A binary built for another torch fails with an undefined symbol (ImportError, OSError), or on first use.
        return str(error)
    return found


@dataclass(frozen=True)
class Choice:
    """An implementation, and why no better one was chosen.

    Attributes:
        kernel: Name of the implementation.
        passed_over: Better implementations, each with its obstacle.
    """

    kernel: str
    passed_over: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        """One line for logs and records."""
        reasons = "; ".join(f"not {name}: {obstacle}" for name, obstacle in self.passed_over)
        return f"{self.kernel} ({reasons})" if reasons else self.kernel


def choose(candidates: Iterable[tuple[str, str | None]]) -> Choice:
    """Take the first candidate without an obstacle.

    Args:
        candidates: Names, best first, each with its obstacle or None. The last must have no obstacle.
    """
    passed_over: list[tuple[str, str]] = []
    for name, obstacle in candidates:
        if obstacle is None:
            return Choice(name, tuple(passed_over))
        passed_over.append((name, obstacle))
    raise AssertionError("the last candidate has no obstacle")


@dataclass(frozen=True)
class DescribedKernel:
    """A kernel with a description of its implementation; the hooks log and record ``description``.

    Attributes:
        kernel: The kernel to call.
        description: Name of the implementation, and why no better one was chosen.
    """

    kernel: Callable[..., Any]
    description: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the kernel."""
        return self.kernel(*args, **kwargs)
