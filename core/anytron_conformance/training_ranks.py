"""Training ranks of the platform under test: processes that keep running and build one engine after another."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from anytron.base.errors import AnytronError
from anytron.base.results import of_error
from anytron.config.running import EngineSection
from anytron.config.schema import RunConfig
from anytron.device.platform import Feature
from anytron.proof.checks import Inapplicable
from anytron.run.groups import training_group
from anytron.run.preflight.limits import NotPossible, adapted
from anytron.run.trainer.workers import TrainingWorkers
from anytron.workers.executor.local import LocalExecutor
from anytron_conformance.ranks import require_devices
from anytron_conformance.rules import Broken

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from anytron.base.results import Result
    from anytron.workers.executor.local import LocalWorkerGroup
    from anytron_conformance.subject import Source, Subject

START_S = 300.0
"""Time limit of a case, in seconds: before the first case, processes start and import an engine."""
ENGINE = str(EngineSection().name)
"""The training engine in which platforms are checked: the default of ``engine.name``."""


class _Started(NamedTuple):
    executor: LocalExecutor
    group: LocalWorkerGroup


class TrainingRanks:
    """Groups of training ranks on a platform, one for each number of ranks, started when first needed.

    Args:
        source: The platform.
        output: A directory for logs and files of engines.

    Attributes:
        session: The plugins that adapt configurations.
    """

    def __init__(self, source: Source, output: Path) -> None:
        self.session = source.open(ENGINE)
        self._source = source
        self._output = output
        self._started: dict[int, _Started] = {}

    def config(self, model: Path, sections: dict[str, dict[str, Any]]) -> RunConfig:
        """Configure a run with a training engine only, in float32 with plain SGD unless ``sections`` change this.

        The platform may set another dtype.

        Raises:
            Inapplicable: The plugins refuse the configuration, or the machine has too few devices.
        """
        known: dict[str, dict[str, Any]] = {
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"source": "jsonl"},
            "rollout": {"samples_per_prompt": 2, "max_new_tokens": 1},  # not used, and fits every model
            "optimizer": {"name": "sgd", "lr": 0.5, "clip_grad": 0.0},
            "engine": {"distributed_optimizer": False},
            "executor": {"num_threads": 1},
            "platform": {"name": self._source.platform, "options": dict(self._source.options)},
            "trainer": {"output_dir": str(self._output)},
        }
        tree = {name: {**known.get(name, {}), **sections.get(name, {})} for name in {**known, **sections}}
        wanted = RunConfig.model_validate({**tree, "rewards": [{"function": "exact_match"}]})
        require_devices(self.session, wanted.parallel.world_size)
        try:
            return adapted(wanted, self.session, "", partial(_asked, options=wanted.engine.options))
        except NotPossible as reason:
            raise Inapplicable(f"the configuration is refused: {reason}") from reason

    def build(self, config: RunConfig) -> TrainingWorkers:
        """Build an engine; the previous engine on the same number of ranks is closed.

        Raises:
            Broken: The engine cannot be built.
        """
        size = config.parallel.world_size
        if size in self._started and self._started[size].group.ended:
            self._started.pop(size).executor.end()
        with said():
            if size in self._started:
                self._started[size].group.rebuild(config)
            else:
                executor = LocalExecutor(config, self.session)
                self._started[size] = _Started(executor, executor.start(training_group(config)))
            return TrainingWorkers.of(self._started[size].group)

    def close(self) -> None:
        """End all processes."""
        while self._started:
            self._started.popitem()[1].executor.end()


@contextmanager
def said() -> Iterator[None]:
    """Convert an error of the engines' processes within the context to :class:`Broken`; the logs have the tracebacks.

    Raises:
        Broken: The engines' processes raised an error.
    """
    try:
        yield
    except AnytronError as error:
        raise Broken(of_error("", error).explanation) from error


def usual_format(subject: Subject) -> str:
    """Return the sequence format for rules that choose none: ``thd`` if the platform supports it, else ``bshd``."""
    return "bshd" if subject.declined((Feature.THD,)) else "thd"


def hold(result: Result, what: str) -> None:
    """Use the result of a check of ``anytron verify`` as the result of a rule's case.

    Args:
        result: Result of the check.
        what: What a failure means, a sentence for the platform's author.

    Raises:
        Broken: The check failed.
        Inapplicable: The check was skipped.
    """
    if result.status == "skipped":
        raise Inapplicable(result.detail)
    if result.status == "failed":
        measured = result.difference is not None and result.tolerance is not None
        numbers = f"largest difference {result.difference:.3g}, allowed {result.tolerance:.1g}; " if measured else ""
        raise Broken(what, f"{numbers}{result.detail}")


def _asked(config: RunConfig, options: Mapping[str, Any]) -> object:
    """The part of a configuration that a platform must not change when it is checked.

    Args:
        config: The configuration.
        options: Requested options of the engine; a platform may add others.
    """
    return (
        config.engine.sequence_format,
        config.engine.recompute,
        {name: config.engine.options.get(name) for name in options},
        config.model.lora,
        config.critic,
        config.rollout.replay_routing,
        config.parallel.model_dump(exclude={"sequence_parallel", "expert_tensor_parallel_size"}),
        config.optimizer,
    )
