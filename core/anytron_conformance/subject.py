"""The platform under test, as the rules see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from anytron.config.schema import default_run
from anytron.device.loading import open_session
from anytron.device.platform import Feature
from anytron.run.preflight.limits import declared_limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    import torch

    from anytron.config.schema import RunConfig
    from anytron.device.hooks.facade import Hooks
    from anytron.device.loading import Session
    from anytron.device.platform import Platform
    from anytron.device.runtime import DeviceRuntime


class Closing(Protocol):
    """An object that holds resources until it is closed."""

    def close(self) -> None:
        """Release the resources."""


Kept = TypeVar("Kept", bound=Closing)


@dataclass(frozen=True)
class Source:
    """The platform to test, with all that is needed to open it in any process.

    Attributes:
        platform: Name of the platform, as in ``platform.name``.
        options: ``platform.options``.
    """

    platform: str
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def config(self) -> RunConfig:
        """The configuration of a run on this platform; all other keys have their defaults."""
        return default_run({"platform": {"name": self.platform, "options": self.options}})

    def open(self, engine: str | None = None) -> Session:
        """Load the plugins of this process, with the platform active.

        Args:
            engine: Training engine for which the platform is opened; None = no particular engine.

        Raises:
            AnytronError: The platform is not installed, its device is absent, or its options are not valid.
        """
        return open_session(self.platform, self.options, engine)


class Subject:
    """The platform under test in this process.

    Args:
        source: The platform to test.
        session: The plugins of this process, opened from ``source``.
        scratch: A directory for files of checks.

    Attributes:
        source, session, scratch: The arguments.
    """

    def __init__(self, source: Source, session: Session, scratch: Path) -> None:
        self.source = source
        self.session = session
        self.scratch = scratch
        self._kept: dict[str, Closing] = {}

    @property
    def platform(self) -> Platform:
        """The platform, its options set."""
        return self.session.platform

    @property
    def hooks(self) -> Hooks:
        """The hooks as engines call them: the platform's, those of installed extensions, and the neutral defaults."""
        return self.session.hooks

    @cached_property
    def runtime(self) -> DeviceRuntime:
        """The device as engines use it."""
        return self.platform.runtime()

    @cached_property
    def device(self) -> torch.device:
        """The device for operands."""
        return self.runtime.current_device()

    @cached_property
    def _limits(self) -> Mapping[Feature, str]:
        import torch

        found = declared_limits(self.platform, self.hooks)
        if not self.runtime.supports_dtype(torch.bfloat16):
            found.setdefault(Feature.BFLOAT16, "supports_dtype(torch.bfloat16) of its runtime is False")
        return found

    def declined(self, features: Iterable[Feature]) -> str | None:
        """Return which of the given features the platform lacks, and why; None if it has all of them."""
        for feature in features:
            if feature in self._limits:
                return f"{self.platform.name} does not support {feature.value}: {self._limits[feature]}"
        return None

    def keep(self, name: str, make: Callable[[], Kept]) -> Kept:
        """Return the object with this name; it is made at the first call and closed together with the subject.

        This is for objects that are expensive to make and used by several rules, such as processes.
        """
        if name not in self._kept:
            self._kept[name] = make()
        return cast("Kept", self._kept[name])

    def drop(self, name: str) -> None:
        """Close the object kept under a name; the next :meth:`keep` makes a new one."""
        self._kept.pop(name).close()

    def close(self) -> None:
        """Close all kept objects."""
        while self._kept:
            self._kept.popitem()[1].close()
