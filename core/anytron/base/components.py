"""Find engines, executors and metric sinks by their names among the entry points of installed distributions.

An entry point of ``anytron.executors`` or ``anytron.metric_sinks`` names a class. One of ``anytron.training_engines``
or ``anytron.rollout_engines`` names an :class:`EngineInfo`, in a module that is light to import. It says what an engine
can do and which options it has; the engine itself is imported in worker processes only.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Literal

from anytron.base.errors import ConfigError, did_you_mean
from anytron.base.files import exhausted
from anytron.base.functions import traced

if TYPE_CHECKING:
    from pydantic import BaseModel

    from anytron.base.metric import Metric

TRAINING_ENGINES, ROLLOUT_ENGINES = "anytron.training_engines", "anytron.rollout_engines"
EXECUTORS, METRIC_SINKS = "anytron.executors", "anytron.metric_sinks"
VERIFICATIONS = "anytron.verifications"
"""Entry-point group of functions that verify the engine of another training framework, each named like the framework
(``verl``). Such a function takes the path of the framework's configuration file, overrides, a directory for logs and a
:class:`anytron.proof.checks.Watcher`, and returns an :class:`anytron.proof.checks.Report`."""

Capability = Literal[
    "critic",
    "teacher",
    "adapters",
    "checkpoints",
    "observation",
    "gradients",
    "inspection",
    "tracing",
    "comparison",
    "offload",
    "sleep",
    "routing",
    "quantization",
    "language_part",
    "bitwise",
]
"""Optional abilities of engines. Each is a protocol of :mod:`anytron.workers.engines.training_engine` or
:mod:`anytron.workers.engines.rollout_engine`, except ``teacher`` (``score`` accepts that role), ``routing``
(responses of a rollout engine record the experts of each token, and passes of a training engine use these experts),
``quantization`` (``load_weights`` of a rollout engine rounds as ``rollout.quantization`` says), ``language_part``
(a training engine reads, and saves in its place, the language model of a directory that holds other models too:
:mod:`anytron.task.data.composites`) and ``bitwise`` (the engine obeys ``engine.on_policy=bitwise``)."""

PlaceOf = Callable[[str], str | None]
"""Function that takes the name of an option that is unknown where the user set it, and returns the key at which an
option of this name exists; None if no option has this name."""


def nowhere(name: str) -> None:
    """Return None for every name: the default of ``EngineInfo.place_of``."""
    del name


@dataclass(frozen=True)
class Component:
    """A library that an engine uses; ``anytron doctor`` reports its version and where it is loaded from.

    Attributes:
        distribution: Name of the library in ``pip list``.
        module: Module of the library that the engine imports, for example ``megatron.core``.
    """

    distribution: str
    module: str


@dataclass(frozen=True)
class EngineInfo:
    """Description of an engine, available without importing the engine.

    Attributes:
        engine: The engine's class, ``module:Class``.
        options_model: A pydantic model of ``engine.options`` or ``rollout.options`` (``extra="forbid"``, every field
            with a docstring or description); None = no options.
        capabilities: The optional features that the engine has (:data:`Capability`).
        platform_check: ``module:function`` of a function that yields a diagnostic for each setting of a run that the
            engine does not support on a platform: (:class:`anytron.config.schema.RunConfig`,
            :class:`anytron.device.platform.Platform`) -> diagnostics. It must not import the engine. Empty = no checks.
        takes_stream: Rollout engines only: whether the process that builds the engine also loads its weights, so that
            weights may be streamed to it (:class:`anytron.workers.weights.stream.WeightStream`).
        part_of: Rollout engines only: the name of the training engine whose ranks also generate the responses
            (:class:`anytron.workers.engines.training_engine.GeneratingEngine`); empty = the rollout engine has its own
            processes and weights.
        metrics: The metrics of a step that the engine reports besides the ones that every training engine reports
            (:mod:`anytron.record.tracking.metric_table`).
        place_of: Function that maps an unknown option name to the nested option with that name (``x`` ->
            ``transformer.x``), for error messages; it returns None if there is no such option.
        components: The libraries that the engine uses.
        memory: ``module:function`` of a function that estimates the device memory of a rank and must not import the
            engine; empty = the engine gives no estimate. For a training engine
            :class:`anytron.workers.engines.estimates.EstimatesTraining`; for a rollout engine
            :class:`anytron.workers.engines.estimates.EstimatesRollout`.
        process_bytes: Measured anonymous memory (``RssAnon`` of ``/proc/<pid>/status``) of one of the engine's
            processes in a run with a tiny model, less what ``memory`` estimates: Python and the imported packages,
            without the libraries' files, which all processes of a machine share. It matters only where the device is
            the CPU. 0 = not measured, or the engine has no separate processes.
        imports: Modules that a process imports after the engine's class, while the driver prepares data. Other
            modules are imported when the engine is built.
        flops: Training engines only: ``module:function`` of a function that counts the floating-point operations of its
            models and must not import the engine (:class:`anytron.workers.engines.estimates.CountsFlops`); empty = the
            engine does not count them.
        proposal: Training engines only: ``module:function`` of a function that says, after ``anytron verify``, how to
            prove a model that no test of the engine proves. It takes the run's configuration
            (:class:`anytron.config.schema.RunConfig`) and the report (:class:`anytron.proof.checks.Report`), and
            returns lines, none if tests prove the model. It must not import the engine. Empty = no such function.
        reward_model: Training engines only: description of the engine that holds a reward model on its ranks
            (:class:`anytron.workers.engines.training_engine.RewardModelEngine`); None = no reward model is possible.
    """

    engine: str
    options_model: type[BaseModel] | None = None
    capabilities: frozenset[Capability] = frozenset()
    platform_check: str = ""
    takes_stream: bool = False
    part_of: str = ""
    metrics: tuple[Metric, ...] = ()
    place_of: PlaceOf = nowhere
    components: tuple[Component, ...] = ()
    memory: str = ""
    process_bytes: int = 0
    imports: tuple[str, ...] = ()
    flops: str = ""
    proposal: str = ""
    reward_model: EngineInfo | None = None

    def load(self) -> Any:
        """Import the engine's class."""
        return _import(self.engine)

    def load_platform_check(self) -> Any:
        """Import the function that ``platform_check`` names; None if the engine has no such function."""
        return _import(self.platform_check) if self.platform_check else None

    def load_memory(self) -> Any:
        """Import the function that ``memory`` names; None if the engine gives no estimate."""
        return _import(self.memory) if self.memory else None

    def load_flops(self) -> Any:
        """Import the function that ``flops`` names; None if the engine does not count operations."""
        return _import(self.flops) if self.flops else None

    def load_proposal(self) -> Any:
        """Import the function that ``proposal`` names; None if the engine has no such function."""
        return _import(self.proposal) if self.proposal else None


def _import(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def component_names(group: str, distribution: str | None = None) -> list[str]:
    """List the names in an entry-point group, sorted; with ``distribution``, only the names that it offers."""
    points = entry_points(group=group)
    return sorted(
        {point.name for point in points if distribution is None or (point.dist and point.dist.name == distribution)}
    )


def find_component(group: str, name: str, key: str) -> EntryPoint:
    """Find the entry point of a name that exactly one installed distribution offers, without loading it.

    Args:
        group: Entry-point group, for example ``anytron.executors``.
        name: Name in that group.
        key: The configuration key that asks for the name, for the error.

    Raises:
        ConfigError: No distribution offers the name, or several do.
    """
    # A path that is listed twice (an editable install beside PYTHONPATH) shows one entry point twice.
    found = {point.value: point for point in entry_points(group=group, name=name)}
    if len(found) == 1:
        return next(iter(found.values()))
    where = f"{key} (entry-point group {group})"
    if found:
        raise ConfigError(
            f"Several installed distributions offer {name!r}.",
            where=where,
            why="; ".join(f"{place} is of {_distribution_of(found[place])}" for place in sorted(found)),
            fix="uninstall all but one of these distributions: pip uninstall NAME",
        )
    known = component_names(group)
    raise ConfigError(
        f"No installed distribution offers {name!r}.",
        where=where,
        why=f"the installed distributions offer: {', '.join(known) or 'no name of this group'}",
        fix=did_you_mean(name, known)
        or f"set {key} to an installed name, or install the distribution that offers {name!r}",
    )


def _distribution_of(point: EntryPoint) -> str:
    return point.dist.name if point.dist else "an unknown distribution"


def load_component(group: str, name: str, key: str) -> Any:
    """Import the object that one installed distribution offers by a name. Arguments as for :func:`find_component`.

    Raises:
        ConfigError: No distribution offers the name, several do, or its import fails.
    """
    point = find_component(group, name, key)
    try:
        return point.load()
    except (Exception, SystemExit) as error:
        raise exhausted(error) or ConfigError(
            f"{point.value} fails to import.",
            where=f"{key} = {name} (entry-point group {group})",
            why=f"{type(error).__name__}: {error}\n{traced(error)}",
            fix=f"correct or reinstall the distribution that offers it: {_distribution_of(point)}",
        ) from error


def engine_info(group: str, name: str, key: str) -> EngineInfo:
    """Load the description of an engine; the engine itself is not imported. Arguments as for :func:`find_component`.

    Raises:
        ConfigError: No distribution offers the engine, several do, or its entry point names no :class:`EngineInfo`.
    """
    info = load_component(group, name, key)
    if not isinstance(info, EngineInfo):
        point = find_component(group, name, key)
        raise ConfigError(
            f"The entry point of the engine {name!r} does not refer to an EngineInfo.",
            where=f"{key} (entry-point group {group})",
            why=f"{point.value} is a {type(info).__name__}, not an anytron.base.components.EngineInfo",
            fix=f"correct or reinstall the distribution that offers it: {_distribution_of(point)}",
        )
    return info
