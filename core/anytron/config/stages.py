"""Split a configuration with several stages into one complete configuration for each stage.

The configuration of a stage is the rest of the file, overridden by the keys of the stage: mappings are merged key by
key, any other value is replaced as a whole. No other code that reads a configuration has to know of stages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError, model_validator

from anytron.base.errors import ConfigError, did_you_mean
from anytron.config.diagnostics import Diagnostic, refuse
from anytron.config.options import in_words
from anytron.config.running import TrainerSection
from anytron.config.section import Section

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

STAGES, STAGE = "stages", "stage"
"""The key of the list of stages, and the key that selects the stage for a command."""
OF_ALL_STAGES = ("trainer.output_dir", "trainer.overwrite", "checkpoint.path", "engine.name")
"""Keys that a stage must not set, although it may set other keys of the same section: they apply to all stages."""

_Section = dict[str, Any]


class StageSection(Section):
    """One of several trainings in a row, which starts from the weights of the previous one.

    Its keys override the same keys of the file's sections; a list replaces a list, and null removes an
    optional section. docs/how-to/fine-tune.md has an example.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")
    """The stage's files are in a directory ``1-NAME``, ``2-NAME``, ... of ``trainer.output_dir``."""
    data: _Section = Field(default_factory=dict)
    """Overrides section ``data``; the other sections likewise."""
    rewards: list[_Section] = Field(default_factory=list)
    """The stage's reward functions."""
    validation: _Section | None = None
    """The stage's validation."""
    rollout: _Section = Field(default_factory=dict)
    """The stage's rollout."""
    environment: _Section | None = None
    """The stage's environment."""
    algorithm: _Section = Field(default_factory=dict)
    """The stage's algorithm."""
    optimizer: _Section = Field(default_factory=dict)
    """The stage's optimizer, which starts without moments and at the first step of its schedule."""
    critic: _Section | None = None
    """The stage's critic."""
    teacher: _Section | None = None
    """The stage's teacher."""
    reward_model: _Section | None = None
    """The stage's reward model."""
    parallel: _Section = Field(default_factory=dict)
    """The stage's parallel sizes."""
    engine: _Section = Field(default_factory=dict)
    """The stage's training engine; ``name`` belongs to all stages."""
    trainer: _Section = Field(default_factory=dict)
    """The stage's loop; ``output_dir`` and ``overwrite`` belong to all stages."""
    checkpoint: _Section = Field(default_factory=dict)
    """The stage's checkpoints; ``path`` belongs to all stages."""


class _Stages(Section):
    """The stages of a file."""

    stages: list[StageSection] = Field(min_length=1)

    @model_validator(mode="after")
    def _possible(self) -> _Stages:
        names = [one.name for one in self.stages]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two stages have the same name: {', '.join(twice)}; give each stage a different name")
        return self


Stage = tuple[dict[str, Any], dict[str, str]]
"""The values of a run, and where each of its keys was set."""


def split_stages(values: Mapping[str, Any], by_key: Mapping[str, str]) -> dict[str, Stage]:
    """Make the configuration of each stage of a file that has stages.

    Args:
        values: The whole file, overrides applied.
        by_key: Place where each key of the file was set.

    Returns:
        By name, in the order of training: the keys of each stage's run, and the places where they were set.

    Raises:
        ConfigError: The stages are malformed, or one sets a key that applies to all stages.
    """
    mistakes: list[Diagnostic] = []
    try:
        stages = _Stages.model_validate({STAGES: values[STAGES]}).stages
    except ValidationError as error:
        stages, mistakes = [], list(in_words(error, _Stages))
    mistakes += _of_all_stages(values[STAGES]) if stages else []
    refuse([_placed(one, by_key) for one in mistakes])
    shared = {name: value for name, value in values.items() if name not in (STAGES, STAGE)}
    runs = {}
    for index, (stage, given) in enumerate(zip(stages, values[STAGES], strict=True)):
        own = {name: value for name, value in given.items() if name != "name"}
        inside = f"{STAGES}.{index}."
        places = {key: place for key, place in by_key.items() if not key.startswith(STAGES)}
        places |= {key.removeprefix(inside): place for key, place in by_key.items() if key.startswith(inside)}
        runs[stage.name] = _in_own_directory(_merged(shared, own), f"{index + 1}-{stage.name}"), places
    return runs


def choose_stage(runs: Mapping[str, Stage], name: Any, where: str) -> Stage:
    """Return the stage that a command works on.

    Raises:
        ConfigError: No stage is named, or no stage has that name.
    """
    if isinstance(name, str) and name in runs:
        return runs[name]
    raise ConfigError(
        "The configuration has several stages, and this command needs one of them.",
        where=where,
        why="no stage is given" if name is None else f"there is no stage {name!r}",
        fix=did_you_mean(str(name), runs, f"{STAGE}=") or "set " + " or ".join(f"{STAGE}={one}" for one in runs),
    )


def _of_all_stages(stages: list[dict[str, Any]]) -> Iterator[Diagnostic]:
    for index, stage in enumerate(stages):
        for key in OF_ALL_STAGES:
            section, _, name = key.partition(".")
            if name in (stage.get(section) or {}):
                message = "this key applies to all stages, but one stage sets it"
                fix = f"remove it from the stage, and set {key} at the top level of the file"
                yield Diagnostic("error", f"{STAGES}.{index}.{key}", message, fix)


def _placed(diagnostic: Diagnostic, by_key: Mapping[str, str]) -> Diagnostic:
    key = diagnostic.key
    while key and key not in by_key:
        key = key.rpartition(".")[0]
    return Diagnostic(diagnostic.severity, diagnostic.key, diagnostic.message, diagnostic.fix, by_key.get(key, ""))


def _merged(shared: Any, own: Any) -> Any:
    """Merge the values of a stage into the shared ones; anything but a mapping is replaced."""
    if not isinstance(shared, dict) or not isinstance(own, dict):
        return own
    return {**shared, **{name: _merged(shared.get(name), value) for name, value in own.items()}}


def _in_own_directory(values: dict[str, Any], directory: str) -> dict[str, Any]:
    """Give a stage its own directory below the directories that are set for all stages."""
    default = TrainerSection.model_fields["output_dir"].default
    for section, name, fallback in (("trainer", "output_dir", default), ("checkpoint", "path", None)):
        given = values.get(section) or {}
        place = given.get(name, fallback) if isinstance(given, dict) else None
        if isinstance(place, str):  # otherwise the schema refuses it
            values = {**values, section: {**given, name: f"{place.rstrip('/')}/{directory}"}}
    return values
