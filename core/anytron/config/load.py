"""Read a run's YAML file, apply overrides and validate: all mistakes at once, each with its place."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from anytron.base.errors import ConfigError, did_you_mean
from anytron.base.files import exhausted
from anytron.config.anchor import anchor
from anytron.config.data import SOURCE_OPTIONS
from anytron.config.diagnostics import Diagnostic, refuse
from anytron.config.generation import RolloutSection
from anytron.config.interpolation import measure
from anytron.config.json_files import DEEPEST, is_too_deep, is_writable, strings
from anytron.config.options import chosen_engines, in_words, model_diagnostics
from anytron.config.running import EngineSection
from anytron.config.schema import RunConfig
from anytron.config.stages import STAGE, STAGES, choose_stage, split_stages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from anytron.base.components import EngineInfo

PUBLIC = re.compile(
    r"(?:^|\.)(?:(?:rewards|sets|mix|stages)\.\d+\.name|model\.config(?:\..+)?|data(?:\..+)?\.options\.system)$"
)
"""Keys of free text that a run writes into metrics.jsonl, samples.jsonl and the model's config.json, which other users
may read; only the owner may read config.yaml."""


@dataclass(frozen=True)
class Places:
    """Where the keys of a configuration were set.

    Attributes:
        path: The YAML file.
        by_key: Dotted key -> ``file:line``, or the override.
    """

    path: Path
    by_key: Mapping[str, str]

    def of(self, key: str) -> str:
        """Return where a key was set, or where the nearest section around it starts."""
        while key:
            if key in self.by_key:
                return self.by_key[key]
            key = key.rpartition(".")[0]
        return str(self.path)

    def locate(self, diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
        """Add to diagnostics the places of their keys."""
        return [replace(diagnostic, place=self.of(diagnostic.key)) for diagnostic in diagnostics]


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration as :func:`read_config` does, and return it without the places of its keys."""
    return read_config(path, overrides)[0]


def read_config(
    path: Path,
    overrides: Sequence[str] = (),
    relative_to: Path | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[RunConfig, Places]:
    """Read a configuration, and where each of its keys was set.

    Args:
        path: YAML file. ``${section.key}`` refers to another key (OmegaConf's interpolation).
        overrides: ``section.key=value``; the value is YAML, ``section.list[0].key`` reaches into
            lists, and a later override wins.
        relative_to: The directory of relative paths, in overrides too; None = the directory of the file.
        settings: Values of keys, or of whole sections, that the command sets after the overrides.

    Returns:
        The configuration, with absolute paths (:func:`anytron.config.anchor.anchor`), and the places of its keys. For a
        file with stages, this is the configuration of the stage that the key ``stage`` names. Whether the run can work
        is not checked here, but by :mod:`anytron.run.preflight`.

    Raises:
        ConfigError: The file is missing or is not YAML, an override has no ``=``, a key is unknown
            (with the nearest known one), or a value is refused by the schema or by the engine whose
            option it is. One error lists all unknown keys and refused values, each with file and line, or with the
            override that set it.
    """
    try:
        values, places = _read_values(path, overrides)
        if STAGES in values:
            values, by_key = choose_stage(split_stages(values, places.by_key), values.get(STAGE), str(path))
            places = Places(path, by_key)
        for key, value in settings.items():
            _set(values, key, value)
            others = {name: place for name, place in places.by_key.items() if not f"{name}.".startswith(f"{key}.")}
            places = Places(path, {**others, key: "set by the command"})
        config, mistakes = _validated(values, places)
        refuse(mistakes)
    except RecursionError:
        raise _too_deep(str(path)) from None
    assert config is not None, "what is not valid has mistakes"
    return anchor(config, relative_to or path.parent), places


def read_stages(path: Path, overrides: Sequence[str] = ()) -> dict[str, tuple[RunConfig, Places]]:
    """Read all stages of a configuration, as :func:`read_config` reads one.

    Returns:
        The stages by name, in the order of training; for a file without stages, the run itself under the name "".

    Raises:
        ConfigError: As :func:`read_config`, or the key ``stage`` names one of the stages.
    """
    try:
        values, places = _read_values(path, overrides)
        if STAGES not in values:
            return {"": read_config(path, overrides)}
        if STAGE in values:
            raise ConfigError(
                "A stage cannot be trained on its own.",
                where=places.of(STAGE),
                why="it starts from the weights of the previous stage",
                fix=f"remove the key {STAGE} to train all stages; with resume=auto, finished stages are skipped",
            )
        read: dict[str, tuple[RunConfig, Places]] = {}
        mistakes: list[Diagnostic] = []
        for name, (own, by_key) in split_stages(values, places.by_key).items():
            config, found = _validated(own, of_stage := Places(path, by_key))
            mistakes += found
            if config is not None:
                read[name] = config, of_stage
        refuse(mistakes)
    except RecursionError:
        raise _too_deep(str(path)) from None
    return {name: (anchor(config, path.parent), of_stage) for name, (config, of_stage) in read.items()}


def _set(values: dict[Any, Any], key: str, value: Any) -> None:
    """Set a dotted key; sections that are missing or null are made."""
    *sections, name = key.split(".")
    for section in sections:
        if values.get(section) is None:
            values[section] = {}
        values = values[section]
    values[name] = value


def _read_values(path: Path, overrides: Sequence[str]) -> tuple[dict[Any, Any], Places]:
    text = _read(path)
    tree = _parse(path, text)
    by_key = _lines(path, text)
    for override in overrides:
        key = _apply(tree, override)
        by_key[key] = f"command line: {override}"
        for end in (index for index, letter in enumerate(key) if letter == "."):
            by_key.setdefault(key[:end], by_key[key])  # a section that the file does not have
    places = Places(path, by_key)
    refuse(places.locate(_secrets_in_public_keys(measure(OmegaConf.to_container(tree, resolve=False), places.of))))
    try:
        values = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key, why = _dotted(str(error.full_key or "")), str(error.msg or error).splitlines()[0]
        variable = re.search(r"Environment variable '([^']*)' not found", why)
        raise ConfigError(
            f"{key or 'The configuration'} cannot be resolved.",
            where=places.of(key),
            why=why,
            fix="set the key, or refer to a key that exists: ${section.key}"
            if variable is None
            else f"set the environment variable {variable[1]}, or write the value itself",
        ) from error
    if is_too_deep(values):
        raise _too_deep(str(path))
    assert isinstance(values, dict), "a file that is not a mapping has been refused"
    return values, places


def _secrets_in_public_keys(secret: Iterable[str]) -> Iterator[Diagnostic]:
    """Report keys that hold the value of an environment variable and are written to files that others can read."""
    for key in sorted(secret):
        if PUBLIC.search(key):
            message = (
                "the value of this key comes from an environment variable, and would be written to files of the run "
                "that other users can read"
            )
            fix = (
                "if the value is not a secret, write it here in place of ${oc.env:...}; if it is, remove this key, and "
                "read the variable in your own code (a reward, a source of prompts)"
            )
            yield Diagnostic("error", key, message, fix)


def _validated(values: dict[str, Any], places: Places) -> tuple[RunConfig | None, list[Diagnostic]]:
    """Return the configuration, paths unchanged, or None if it is not valid; and the mistakes, with their places."""
    config, mistakes = None, [*_text_mistakes(values), *_option_mistakes(values)]
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        place_of = partial(_place_of_option, values=values)
        mistakes = [*in_words(error, RunConfig, place_of=place_of), *mistakes]
    return config, places.locate(mistakes)


def _too_deep(where: str) -> ConfigError:
    why = f"lists and mappings are nested more than {DEEPEST} levels deep"
    fix = "use fewer levels of lists and mappings"
    return ConfigError("The configuration is nested too deeply.", where=where, why=why, fix=fix)


def _text_mistakes(values: Any) -> Iterator[Diagnostic]:
    """Report text that UTF-8 cannot encode, from YAML escapes or from an override that is not UTF-8, and NUL."""
    for key, text in strings(values):
        if not is_writable(text) or "\0" in text:
            what = "has a NUL character" if "\0" in text else "has a character that UTF-8 cannot encode"
            yield Diagnostic("error", key, f"{text!a} {what}", "replace or remove this character")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        files = [file.name for file in path.parent.glob("*.y*ml")]
        raise ConfigError(
            f"There is no configuration file {path}.",
            where=str(path.parent.resolve()),
            why="no such file" if path.parent.is_dir() else "no such directory",
            fix=did_you_mean(path.name, files, f"{path.parent}/") or "give the path of a YAML file",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise exhausted(error) or ConfigError(
            f"The configuration {path} cannot be read.",
            where=str(path),
            why=str(error),
            fix="make the file readable, and save it as UTF-8",
        ) from error


def _yaml_is_too_deep(text: str) -> bool:
    """Whether lists and mappings are nested too deeply. PyYAML's parser tells; libyaml's would recurse and crash."""
    depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent))
            depth -= isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent))
            if depth > DEEPEST:
                return True
    except yaml.YAMLError:  # whoever builds the values says it better
        pass
    return False


def _parse(path: Path, text: str) -> Any:
    if _yaml_is_too_deep(text):
        raise _too_deep(str(path))
    try:
        tree = OmegaConf.create(text)  # YAML in which 1e-5 is a number and a key may stand only once
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        fix = "correct the YAML at this line and column"
        raise ConfigError(
            "The configuration is not valid YAML.", where=where, why=str(error.problem), fix=fix
        ) from error
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, AssertionError) as error:
        fix = "correct the YAML; any linter for YAML shows the line"
        raise ConfigError("The configuration is not valid YAML.", where=str(path), why=str(error), fix=fix) from error
    if not OmegaConf.is_dict(tree):
        raise ConfigError(
            "The configuration is not a mapping of sections.",
            where=str(path),
            why=f"its top level is a {type(OmegaConf.to_container(tree)).__name__}",
            fix="start with sections: " + ", ".join(RunConfig.model_fields),
        )
    return tree


def _apply(tree: Any, override: str) -> str:
    key, equals, value = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(
            f"Override {override!r} is not key=value.",
            where="command line",
            fix="write KEY=VALUE, for example trainer.total_steps=10",
        )
    if _yaml_is_too_deep(value):
        raise _too_deep(f"command line: {key}")
    try:
        parsed = OmegaConf.from_dotlist([f"value={value}"])
        OmegaConf.update(tree, key, OmegaConf.to_container(parsed, resolve=False)["value"], merge=False)  # type: ignore[index, call-overload]
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"Override {override!r} cannot be applied.",
            where="command line",
            why=str(error).splitlines()[0],
            fix="write section.key=VALUE or section.list[0].key=VALUE, where VALUE is valid YAML",
        ) from error
    return _dotted(key)


def _dotted(key: str) -> str:
    """``rewards[0].weight`` as ``rewards.0.weight``."""
    return key.replace("[", ".").replace("]", "")


def _lines(path: Path, text: str) -> dict[str, str]:
    """Where each key stands: dotted key -> ``file:line``."""
    places: dict[str, str] = {}

    def visit(node: yaml.Node | None, prefix: str) -> None:
        pairs: Iterable[tuple[str, int, yaml.Node]] = ()
        if isinstance(node, yaml.MappingNode):
            pairs = [(str(key.value), key.start_mark.line, value) for key, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            pairs = [(str(index), value.start_mark.line, value) for index, value in enumerate(node.value)]
        for name, line, value in pairs:
            key = f"{prefix}{name}"
            places[key] = f"{path}:{line + 1}"
            visit(value, f"{key}.")

    visit(yaml.compose(text, Loader=yaml.SafeLoader), "")
    return places


def _engines(values: Any) -> dict[str, EngineInfo]:
    """The engines that the values choose; other values need not be valid."""
    name = _value(values, "engine", "name", EngineSection().name)
    rollout = _value(values, "rollout", "engine", RolloutSection().engine)
    return chosen_engines(str(name), str(rollout))


def _option_mistakes(values: Any) -> list[Diagnostic]:
    """Check the options of both engines and of sources of prompts; the schema refuses options that are no mapping."""
    found = []
    for key, info in _engines(values).items():
        section, name = key.split(".")
        options = _value(values, section, name, {})
        if isinstance(options, dict):  # otherwise the schema refuses it
            found += model_diagnostics(info.options_model, options, key, info.place_of)
    found += _source_option_mistakes("data", values.get("data"))
    sets = _value(values, "validation", "sets", [])
    for index, one in enumerate(sets if isinstance(sets, list) else ()):
        if isinstance(one, dict):
            found += _source_option_mistakes(f"validation.sets.{index}.data", one.get("data"))
    return found


def _source_option_mistakes(key: str, section: Any) -> Iterator[Diagnostic]:
    """Check the options of registered sources of prompts, in a section ``data`` or in an entry of its ``mix``."""
    if not isinstance(section, dict):  # the schema refuses it
        return
    source, options, mix = section.get("source"), section.get("options", {}), section.get("mix")
    if isinstance(source, str) and source in SOURCE_OPTIONS and isinstance(options, dict):
        yield from model_diagnostics(SOURCE_OPTIONS[source], options, f"{key}.options")
    for index, one in enumerate(mix if isinstance(mix, list) else ()):
        yield from _source_option_mistakes(f"{key}.mix.{index}", one)


def _value(values: Any, section: str, key: str, default: Any) -> Any:
    given = values.get(section)
    return given.get(key, default) if isinstance(given, dict) else default


def _place_of_option(name: str, values: Any) -> str | None:
    """The key of the engine option that has this name; None if neither engine has one."""
    for key, info in _engines(values).items():
        if info.options_model is not None and name in info.options_model.model_fields:
            return f"{key}.{name}"
    return None
