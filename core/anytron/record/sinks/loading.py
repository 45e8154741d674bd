"""Find the sinks that a run names, and check them before it starts."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from anytron.base.components import METRIC_SINKS, component_names, load_component
from anytron.base.errors import ConfigError, did_you_mean
from anytron.config.diagnostics import Diagnostic
from anytron.config.imports import resolve
from anytron.config.options import model_diagnostics
from anytron.record.sinks.contract import SINK, MetricSink

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.config.running import SinkSection
    from anytron.config.schema import RunConfig


def sink_name(section: SinkSection) -> str:
    """Give the short name of a sink: as it is registered, or its class's."""
    return section.sink.rpartition(":")[2]


def load_sink(section: SinkSection, key: str) -> type[MetricSink]:
    """Find the class of a sink. The library that it needs is not imported.

    Args:
        section: Names it.
        key: Where that stands in the configuration, for the error.

    Raises:
        ConfigError: Nothing has that name, or what has it is no sink.
    """
    where = f"{key}.sink"
    if ":" in section.sink:
        found: object = resolve(section.sink, SINK, key=where)
    elif section.sink in (known := component_names(METRIC_SINKS)):
        found = load_component(METRIC_SINKS, section.sink, where)
        SINK.check(found, where)
    else:
        raise ConfigError(
            f"There is no sink {section.sink!r}.",
            where=where,
            why=f"installed are: {', '.join(known)}",
            fix=did_you_mean(section.sink, known) or "name one of them, 'module:Class' or 'file.py:Class'",
        )
    if not (isinstance(found, type) and issubclass(found, MetricSink)):
        raise ConfigError(
            f"{section.sink} is not a sink of metrics.",
            where=where,
            why="it is not a subclass of anytron.record.sinks.MetricSink",
            fix="make it a subclass, as docs/how-to/write-a-metric-sink.md shows",
        )
    return found


def sink_diagnostics(config: RunConfig) -> Iterator[Diagnostic]:
    """Find sinks that do not exist, whose package is missing, whose options are wrong, or that are named twice."""
    names: list[str] = []
    for index, section in enumerate(config.tracking.sinks):
        key = f"tracking.sinks.{index}"
        try:
            sink = load_sink(section, key)
        except ConfigError as error:
            yield Diagnostic("error", f"{key}.sink", f"{error.what.removesuffix('.')}; {error.why}", error.fix)
            continue
        for package in sink.packages:
            if importlib.util.find_spec(package) is None:
                why = f"{section.sink} needs the package {package}, which is not installed"
                yield Diagnostic("error", f"{key}.sink", why, sink.install or f"install {package}")
        yield from model_diagnostics(sink.options_model, section.options, f"{key}.options")
        if sink_name(section) in names:
            why = f"two sinks have the name {sink_name(section)}, and would write into the same directory"
            yield Diagnostic("error", f"{key}.sink", why, "remove one of them")
        names.append(sink_name(section))
