"""Examine topic by topic. What one of them raises becomes its own entry.

Distributions add topics by entry points of the group :data:`GROUP`.
"""

from __future__ import annotations

from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from anytron.base.entries import Entry, of_error
from anytron.proof.doctor import (
    compatibility,
    configuration,
    devices,
    duplicates,
    environment,
    executors,
    kernels,
    memory,
    numbers,
    patches,
    plugins,
    versions,
)
from anytron.proof.doctor.live import Live
from anytron.proof.doctor.subject import look

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from anytron.proof.doctor.subject import Subject

    Topic = Callable[[Subject], Iterable[Entry]]
    LiveTopic = Callable[[Subject, Live], Iterable[Entry]]

GROUP = "anytron.doctor"
"""Entry points, named as their topics: functions from a :class:`~anytron.proof.doctor.subject.Subject` to entries."""
TOPICS: Mapping[str, Topic] = {
    "versions": versions.examine,
    "duplicates": duplicates.examine,
    "compatibility": compatibility.examine,
    "plugins": plugins.examine,
    "platform": plugins.examine_platform,
    "environment": environment.examine,
    "patches": patches.examine,
    "configuration": configuration.examine,
}
LIVE_TOPICS: Mapping[str, LiveTopic] = {
    "devices": devices.examine,
    "executors": executors.examine,
    "kernels": kernels.examine,
    "numbers": numbers.examine,
    "memory": memory.examine,
}
"""Those that ask a process with the device."""


def examine(path: Path | None = None, overrides: Sequence[str] = ()) -> Iterator[Entry]:
    """Examine this machine, and the run that a configuration describes. Nothing is changed.

    Args:
        path: The YAML file of a run; None = no run in particular.
        overrides: Keys to set in it.

    Yields:
        Entries, those of a topic one after the other.
    """
    subject = look(path, overrides)
    for name, topic in TOPICS.items():
        yield from _guarded(name, partial(topic, subject))
    for added in entry_points(group=GROUP):
        yield from _guarded(added.name, partial(_added, added, subject))
    with Live(subject) as live:
        for name, live_topic in LIVE_TOPICS.items():
            yield from _guarded(name, partial(live_topic, subject, live))


def _added(found: EntryPoint, subject: Subject) -> Iterable[Entry]:
    topic: Topic = found.load()
    return topic(subject)


def _guarded(name: str, topic: Callable[[], Iterable[Entry]]) -> Iterator[Entry]:
    """The entries of a topic, and one more if it fails on the way."""
    try:
        yield from topic()
    except Exception as error:  # noqa: BLE001 - a topic that crashes is a finding, and the others go on
        yield of_error(f"{name}.crashed", error)
