"""Check the options of registered rewards, training's and validation's, as those of engines are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel

from anytron.config.diagnostics import Diagnostic
from anytron.config.options import model_diagnostics
from anytron.task.rewards.registered import REWARDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.config.schema import RunConfig


def reward_diagnostics(config: RunConfig) -> Iterator[Diagnostic]:
    """Find options that a registered reward does not take, and say loudly where programs run half-protected."""
    places = {f"rewards.{index}": section for index, section in enumerate(config.rewards)}
    for number, one in enumerate([] if config.validation is None else config.validation.sets):
        places |= {f"validation.sets.{number}.rewards.{index}": section for index, section in enumerate(one.rewards)}
    for place, section in places.items():
        key, reward = f"{place}.options", REWARDS.get(section.function)
        if isinstance(reward, type) and issubclass(reward, BaseModel):
            yield from model_diagnostics(reward, section.options, key)
        if section.function == "code" and section.options.get("sandbox") == "reduced":
            message = "programs that the model writes can read whatever you can read"
            yield Diagnostic("warning", f"{key}.sandbox", message, "full, where the kernel allows it")
