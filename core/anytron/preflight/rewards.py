"""Check the options of registered rewards, as those of engines are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel

from anytron.config.diagnostics import Diagnostic
from anytron.config.options import model_diagnostics
from anytron.rewards.registered import REWARDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.config.schema import RunConfig


def reward_diagnostics(config: RunConfig) -> Iterator[Diagnostic]:
    """Find options that a registered reward does not take, and say loudly where programs run half-protected."""
    for index, section in enumerate(config.rewards):
        key, reward = f"rewards.{index}.options", REWARDS.get(section.function)
        if isinstance(reward, type) and issubclass(reward, BaseModel):
            yield from model_diagnostics(reward, section.options, key)
        if section.function == "code" and section.options.get("sandbox") == "reduced":
            message = "programs that the model writes can read whatever you can read, and write to your files"
            yield Diagnostic("warning", f"{key}.sandbox", message, "full, where the kernel allows it")
