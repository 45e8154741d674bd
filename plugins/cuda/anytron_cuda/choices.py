"""How an implementation of a kernel is chosen: candidates, best first, and what stands in the way of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

NEUTRAL = "neutral"
"""Name of the reference kernels of :mod:`anytron.kernels`, plain torch operations."""


@dataclass(frozen=True)
class Choice:
    """An implementation, and why it is not a better one.

    Attributes:
        kernel: Name of the implementation.
        passed_over: Better ones, each with what stands in its way.
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
        candidates: Names, best first, each with its obstacle or None. The last has none.
    """
    passed_over: list[tuple[str, str]] = []
    for name, obstacle in candidates:
        if obstacle is None:
            return Choice(name, tuple(passed_over))
        passed_over.append((name, obstacle))
    raise AssertionError("the last candidate has no obstacle")


@dataclass(frozen=True)
class DescribedKernel:
    """A kernel that says which implementation it is; the hooks log and record ``description``.

    Attributes:
        kernel: What is called.
        description: Which implementation it is, and why not a better one.
    """

    kernel: Callable[..., Any]
    description: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the kernel."""
        return self.kernel(*args, **kwargs)
