"""The functions and files that the sets of validation name. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anytron.config.schema import RunConfig


def validation_references(config: RunConfig) -> dict[str, str]:
    """Return the sources and reward functions of all sets, by the keys that name them."""
    found: dict[str, str] = {}
    for index, one in enumerate([] if config.validation is None else config.validation.sets):
        sources = one.data.keyed_sources(f"validation.sets.{index}.data")
        found |= {f"{key}.source": source.source for key, source in sources.items()}
        for place, reward in enumerate(one.rewards):
            found[f"validation.sets.{index}.rewards.{place}.function"] = reward.function
    return found


def validation_files(config: RunConfig) -> dict[str, str]:
    """Return the files of prompts of all sets, by the keys that name them."""
    sets = [] if config.validation is None else config.validation.sets
    return {
        f"{key}.options.path": path
        for index, one in enumerate(sets)
        for key, source in one.data.keyed_sources(f"validation.sets.{index}.data").items()
        if isinstance(path := source.options.get("path"), str)
    }
