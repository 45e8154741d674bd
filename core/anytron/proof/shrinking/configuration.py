"""Shrink a published ``config.json``: its sizes are cut, and every other field stays as it is."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anytron.base.errors import ConfigError
from anytron.proof.shrinking import vision
from anytron.proof.shrinking.language import (
    DEPTH,
    HEADS,
    VOCABULARY,
    WIDTH,
    first,
    new_depth,
    new_layer_fields,
    new_rotation,
    new_sizes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from anytron.base.traits import ParallelSizes

    Fields = dict[str, Any]
    Read = Callable[[Fields], Any]

TEXT, VISION = "text_config", "vision_config"
ORDINARY = 96
"""Tokens below this have no special meaning, except those that the published configuration gives one."""
DROPPED = ("quantization_config", "auto_map", "torch_dtype", "dtype")
"""Fields that describe the published weights and code, not the shape of the model."""
_ROTATIONS = ("rope_parameters", "rope_scaling")
BY_HAND = (
    "write a small configuration of this family under model.config, and verify it without --shrink "
    "(docs/how-to/verify-before-you-train.md)"
)


@dataclass(frozen=True)
class Shrunk:
    """A published configuration with small sizes.

    Attributes:
        fields: The new ``config.json``.
        cuts: Old and new value of each field that changed, by its name; fields of ``vision_config`` have that prefix.
        dropped: Fields that were left out.
    """

    fields: Fields
    cuts: Mapping[str, tuple[Any, Any]]
    dropped: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        """What was cut and left out, for a person: the sizes first, then lists and numbers of tokens."""
        sizes = {name: pair for name, pair in self.cuts.items() if isinstance(pair[0], int) and "token" not in name}
        shown = [f"{name} {before} -> {after}" for name, (before, after) in sizes.items()]
        others = [name for name in self.cuts if name not in sizes]
        lines = [f"shrunk: {', '.join(shown)}"]
        if others:
            lines.append(f"changed with them: {', '.join(others)}")
        if self.dropped:
            lines.append(f"left out, because the weights are random: {', '.join(self.dropped)}")
        return lines


def shrink(config: Mapping[str, Any], where: str, layout: ParallelSizes, read: Read | None) -> Shrunk:
    """Cut the sizes of a configuration.

    Args:
        config: A published ``config.json``.
        where: Name of the configuration in errors.
        layout: Parallel sizes by which the new sizes are divisible, if the published ones are.
        read: Function that builds a ``transformers.PretrainedConfig`` from fields. Sizes that the file leaves to the
            defaults of its class are known from there. None = transformers does not know the model.

    Raises:
        ConfigError: The configuration lacks a size, or has a part that cannot be shrunk.
    """
    fields = deepcopy({name: value for name, value in config.items() if name not in DROPPED})
    whole = None if read is None else read(dict(config))
    text = fields[TEXT] if isinstance(fields.get(TEXT), dict) else fields
    for name in DROPPED:
        text.pop(name, None)
    known = _known(text, whole and whole.get_text_config())
    _check(known, fields, where)
    before, width = first(known, DEPTH)[1], first(known, WIDTH)[1]
    depth = new_depth(known, before, layout.pipeline)
    sizes = {**new_sizes(known, layout), **new_layer_fields(known, depth)}
    _apply(text, sizes, known)
    if text is not fields:  # some files repeat sizes outside
        _apply(fields, {name: value for name, value in sizes.items() if fields.get(name) == known[name]}, known)
    _rotate(text, known, sizes)
    towers: Fields = {}
    tower: Fields = {}
    if isinstance(fields.get(VISION), dict):
        tower = _known(fields[VISION], getattr(whole, VISION, None))
        _check_tower(tower, where)
        if whole is not None and "spatial_merge_size" not in tower:  # it would get text only
            raise impossible(where, f"{VISION} does not describe a tower that reads patches with a grid")
        towers = vision.new_vision_sizes(tower, width, sizes.get(first(known, WIDTH)[0], width))
        _apply(fields[VISION], towers, tower)
    vocabulary: int = sizes[VOCABULARY] if VOCABULARY in sizes else known[VOCABULARY]
    for name, value in known.items():  # of its class
        if _is_token(name) and text.get(name) is None and max(_numbers(value), default=0) >= vocabulary:
            text[name] = value
    _renumber(fields, vocabulary)
    if read is not None:
        _complete(fields, text, sizes, known, towers, tower, read)
    return Shrunk(fields, _cuts(config, fields), tuple(name for name in DROPPED if name in config))


def _known(fields: Fields, class_config: Any) -> Fields:
    """Add to the fields of a file what its class sets."""
    return {**_values(class_config), **{name: value for name, value in fields.items() if value is not None}}


def _values(class_config: Any) -> Fields:
    """The fields of a part of a ``transformers.PretrainedConfig``; some classes leave a part as a mapping."""
    if class_config is None or isinstance(class_config, dict):
        return dict(class_config or {})
    values: Fields = class_config.to_dict()
    return values


def _check(known: Mapping[str, Any], fields: Fields, where: str) -> None:
    for what, names in (("layers", DEPTH), ("heads", HEADS), ("width", WIDTH), ("vocabulary", (VOCABULARY,))):
        name, size = first(known, names)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            found = f"{name} is {size!r}" if name else f"it has none of {', '.join(names)}"
            raise impossible(where, f"the size of its {what} is not known: {found}")
    for part in ("audio_config", "thinker_config", "projector_config"):
        if fields.get(part):
            raise impossible(where, f"the sizes of its {part} are not known")


def _check_tower(tower: Mapping[str, Any], where: str) -> None:
    for names in (vision.DEPTH, vision.HEADS, ("embed_dim", "hidden_size"), ("patch_size",)):
        name, size = first(tower, names)
        if not isinstance(size, int) or size < 1:
            found = f"{name} is {size!r}" if name else f"it has none of {', '.join(names)}"
            raise impossible(where, f"{VISION} does not describe a tower that reads patches with a grid: {found}")


def impossible(where: str, why: str) -> ConfigError:
    """Make the error that says why a configuration cannot be shrunk, and what to do."""
    return ConfigError("This model cannot be shrunk.", where=where, why=why, fix=BY_HAND)


def _apply(fields: Fields, new: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Set new values where the file has the field; a null field follows from others, and stays null."""
    for name, value in new.items():
        if fields.get(name) is not None and fields[name] == known[name]:
            fields[name] = value


def _rotate(text: Fields, known: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    _, heads = first(known, HEADS)
    _, width = first(known, WIDTH)
    name = "head_dim" if known.get("head_dim") else "qk_rope_head_dim"
    before = known.get(name) or width // heads
    new_heads = sizes.get(first(known, HEADS)[0], heads)
    after = sizes.get(name) or sizes.get(first(known, WIDTH)[0], width) // new_heads
    for field in _ROTATIONS:
        if isinstance(text.get(field), dict):
            text[field] = new_rotation(text[field], before, after)


def _renumber(fields: Fields, vocabulary: int) -> None:
    """Give special tokens numbers in the new vocabulary, equal where they were equal."""
    parts = [fields, *(part for name in (TEXT, VISION) if isinstance(part := fields.get(name), dict))]
    used = {number for part in parts for name in part if _is_token(name) for number in _numbers(part[name])}
    large = sorted(number for number in used if number >= ORDINARY)
    new = {number: vocabulary - 1 - place for place, number in enumerate(reversed(large))}
    for part in parts:
        for name, value in part.items():
            if _is_token(name):
                if isinstance(value, list):
                    part[name] = [new.get(one, one) for one in value]
                elif _numbers(value):
                    part[name] = new.get(value, value)


def _is_token(name: str) -> bool:
    return name.endswith(("token_id", "token_ids", "token_index"))


def _numbers(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [one for one in values if isinstance(one, int) and not isinstance(one, bool)]


def _complete(
    fields: Fields, text: Fields, sizes: Fields, known: Fields, towers: Fields, tower: Fields, read: Read
) -> None:
    """Write the sizes that the file leaves to its class, and that the class does not derive from the others."""
    try:
        whole = read(dict(fields))
    except ConfigError:
        return  # building the model says why
    for part, new, old, values in (
        (text, sizes, known, whole.get_text_config()),
        (fields.get(VISION, {}), towers, tower, getattr(whole, VISION, None)),
    ):
        now = _values(values)
        for name, value in new.items():
            if part.get(name) is None and now.get(name) == old[name]:  # the class's own default
                part[name] = value


def _cuts(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, dict) and isinstance(old, dict) and name in (TEXT, VISION):
            found.update(_cuts(old, value, "" if name == TEXT else f"{name}."))
        elif value != old:
            found[f"{prefix}{name}"] = (old, value)
    return found
