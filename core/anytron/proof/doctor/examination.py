"""Examine a machine and a run topic by topic. An exception in a topic becomes the result ``TOPIC.all``.

Installed distributions can add topics by entry points in the group :data:`GROUP`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from anytron.proof.checks import Check, Watcher, make
from anytron.proof.doctor import devices, modules, packages, session
from anytron.proof.doctor.live import Live
from anytron.proof.doctor.subject import look

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from importlib.metadata import EntryPoint
    from pathlib import Path

    from anytron.base.results import Result
    from anytron.proof.doctor.subject import Subject

GROUP = "anytron.doctor"
"""Entry-point group of added topics. Each entry point has the topic's name, and is a function that gets a
:class:`~anytron.proof.doctor.subject.Subject` and returns results."""
TOPICS = (
    Check("versions.all", modules.examine_versions),
    Check("duplicates.all", packages.examine_duplicates),
    Check("compatibility.all", packages.examine_compatibility),
    Check("plugins.all", session.examine_plugins),
    Check("platform.all", session.examine_platform),
    Check("environment.all", session.examine_environment),
    Check("patches.all", session.examine_patches),
    Check("configuration.all", session.examine_configuration),
)
LIVE_TOPICS = (
    Check("devices.all", devices.examine_devices),
    Check("executors.all", devices.examine_executors),
    Check("kernels.all", devices.examine_kernels),
    Check("operators.all", devices.examine_operators),
    Check("numbers.all", devices.examine_numbers),
    Check("memory.all", devices.examine_memory),
)
"""Topics that run probes in a process that uses the device."""


def examine(path: Path | None = None, overrides: Sequence[str] = ()) -> Iterator[Result]:
    """Examine this machine, and the run that a configuration describes. Nothing is changed.

    Args:
        path: The YAML file of a run; None = no run in particular.
        overrides: Keys to set in the configuration, each as ``key=value``.

    Yields:
        Results, topic by topic.
    """
    subject = look(path, overrides)
    added = [Check(f"{one.name}.all", partial(_added, one)) for one in entry_points(group=GROUP)]
    with Live(subject) as live:
        asking = [replace(topic, function=partial(topic.function, live=live)) for topic in LIVE_TOPICS]
        yield from make([*TOPICS, *added, *asking], lambda check: check.results(subject), Watcher())


def _added(found: EntryPoint, subject: Subject) -> Iterable[Result]:
    topic: Callable[[Subject], Iterable[Result]] = found.load()
    return topic(subject)
