"""``anytron scale``: ask a run that goes on for another number of rollout replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ValidationError

from anytron.base.errors import ConfigError
from anytron.base.files import exhausted, write_durably
from anytron.config.schema import RunConfig
from anytron.record.report.run import Run, State
from anytron.record.tracking.claim import REPLICAS
from anytron.record.tracking.record import RECORD
from anytron.run.preflight.capabilities import generates_in_training
from anytron.run.rollout.scaling import check_number, most_replicas

if TYPE_CHECKING:
    from pathlib import Path


def ask_for_replicas(path: Path, count: int) -> str:
    """Write the wanted number of replicas into a run's directory.

    Args:
        path: The run's directory.
        count: Number of replicas, 1 or more.

    Returns:
        What the run will do, in a sentence.

    Raises:
        ConfigError: ``path`` is not the directory of a run, the run has ended, it has no rollout replicas, or a step
            has fewer than ``count`` responses.
    """
    run = Run(path)
    if run.record is None or run.state not in (State.GOING, State.UNKNOWN):
        raise ConfigError(
            "The number of replicas can be changed only while a run goes on.",
            where=str(run.path),
            why="its run.json cannot be read" if run.record is None else f"the run is {run.state.value}",
            fix=f"continue the run with the new number: anytron train CONFIG resume=auto rollout.replicas={count}",
        )
    try:
        config = RunConfig.model_validate(run.record.config)
    except ValidationError as error:
        raise ConfigError(
            "This version of Anytron cannot read the configuration of the run.",
            where=str(run.path / RECORD),
            why="; ".join(f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in error.errors()),
            fix="run anytron scale with the version of Anytron that trains the run",
        ) from error
    if config.supervised or generates_in_training(config):
        raise ConfigError(
            "This run has no rollout replicas.",
            where=str(run.path),
            why="it generates no responses" if config.supervised else "its training ranks generate the responses",
            fix="give the directory of a run of reinforcement learning whose rollout.engine is transformers or vllm",
        )
    check_number(count, most_replicas(config))
    try:
        write_durably(run.path / REPLICAS, f"{count}\n")
    except OSError as error:
        raise exhausted(error, str(run.path)) or ConfigError(
            "The number of replicas cannot be written into the run's directory.",
            where=str(run.path / REPLICAS),
            why=str(error),
            fix="run the command as the user to whom the run belongs",
        ) from error
    return f"the run in {run.path} changes to {count} replica{'' if count == 1 else 's'} before its next step"
