"""Train stages one after the other: each is a separate run, which starts from the model of the previous stage.

A stage has the files of a run, in a separate directory, so that all code that reads, resumes or exports a run also
works with a stage. The next stage receives the weights in ``hf/``, or the adapters in ``adapter/``.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from anytron.base.errors import ConfigError, within
from anytron.record.checkpoint.differences import carries_out, differences
from anytron.record.checkpoint.resume import choose_start
from anytron.record.tracking.claim import ClaimedDirectory
from anytron.record.tracking.record import RunRecord
from anytron.run.preflight.prepare import prepare, prepare_held_out, prepare_prompts, prepare_validation
from anytron.run.trainer.models import ADAPTER, MODEL, model_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from anytron.config.schema import RunConfig


def remaining_stages(stages: Mapping[str, RunConfig], tell: Callable[[str], None]) -> Iterator[tuple[str, RunConfig]]:
    """Yield the stages to train, one after the other, each with the model that it starts from.

    The data of all stages are read before the first stage is yielded; otherwise a mistake in the last stage might be
    found after days. Ask for the next stage when the previous stage has been trained to its end.

    Args:
        stages: Configurations by name, in training order, checked; each has the model that the YAML file names.
        tell: Called with a message about each stage that has been trained already.

    Raises:
        ConfigError: The directory of a stage holds another run; or a stage must be continued or was changed, although
            the next stage has begun already.
        DataError: The data of a stage are not usable.
    """
    configs = list(stages.values())
    if configs[0].resume not in ("never", "auto"):
        raise ConfigError(
            "A configuration with stages cannot start from a checkpoint.",
            where=f"resume = {configs[0].resume}",
            why=f"the configuration has {len(configs)} stages, but resume names a checkpoint of one run",
            fix="set resume=auto to continue the stage that was interrupted, or resume=never to train all stages from "
            "the beginning",
        )
    if configs[0].resume == "never":
        _clear(configs, tell)
    begun = [index for index, config in enumerate(configs) if _record(config) is not None]
    for name, config in list(stages.items())[1:]:
        with within(f"stage {name}"):
            _read_data(config)
    before: RunConfig | None = None
    for index, (name, config) in enumerate(stages.items()):
        before = config if before is None else continued(config, before)
        if index < max(begun, default=0):
            _require_over(name, before)
            tell(f"stage {name} has finished")
        else:
            yield name, before


def continued(config: RunConfig, before: RunConfig) -> RunConfig:
    """Make a stage start from the model that the previous stage has trained.

    With ``model.lora`` the stage continues the adapters, beside the unchanged weights; otherwise it continues the
    weights.

    Args:
        config: Configuration of the stage, with the model that the YAML file names.
        before: Configuration of the previous stage, with the model that it started from.
    """
    trained, model = Path(before.trainer.output_dir).absolute(), config.model
    changed: dict[str, object] = {"path": str(trained / MODEL), "config": None}
    if model.lora is not None:
        lora = model.lora.model_copy(update={"path": str(trained / ADAPTER)})
        changed = {"path": str(model_directory(before)), "config": None, "lora": lora}
    return config.model_copy(update={"model": model.model_copy(update=changed)})


def _clear(configs: Sequence[RunConfig], tell: Callable[[str], None]) -> None:
    """Delete the files of earlier runs of all stages; raise an error if there are any without ``trainer.overwrite``."""
    with contextlib.ExitStack() as claims:
        claimed = [claims.enter_context(ClaimedDirectory(config, tell)) for config in configs]
        for config, directory in zip(configs, claimed, strict=True):
            choose_start(config, directory, tell)
        for config, directory in zip(configs, claimed, strict=True):
            directory.clear(logs=config.trainer.overwrite)


def _read_data(config: RunConfig) -> None:
    if config.supervised:
        prepare_held_out(config, prepare_prompts(config))
    else:
        prepare_validation(config, prepare(config))


def _record(config: RunConfig) -> RunRecord | None:
    return RunRecord.read(Path(config.trainer.output_dir))


def _require_over(name: str, config: RunConfig) -> None:
    """Raise an error if a stage is unfinished or was changed, because a later stage has begun with its weights.

    Args:
        name: Name of the stage.
        config: Configuration of the stage, with the model that it starts from.
    """
    record = _record(config)
    found = [] if record is None else differences(record.config, config.model_dump(mode="json"))
    changes = [one for one in found if not carries_out(one.key) or one.key == "trainer.total_steps"]
    over = record is not None and record.finished_step is not None
    if over and not changes:
        return
    raise ConfigError(
        f"Stage {name} still has to be trained, but a later stage has already begun.",
        where=f"trainer.output_dir = {config.trainer.output_dir}",
        why=f"the stage finished with a different configuration: {'; '.join(map(str, changes))}"
        if over
        else "the stage's directory does not show that it finished",
        fix="restore the stage's configuration and directory, or train all stages again with resume=never "
        "trainer.overwrite=true",
    )
